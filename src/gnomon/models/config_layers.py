"""What each layer is: dense or mixture, its own selection or another layer's.

In:  the fields of a config.json and the number of layers.
Out: one word per layer. Lists may go on for the MTP layers that follow; those entries are cut off.
Rules: oracle_math §1.6. `indexer_types` wins, then `index_topk_pattern` (F and S, by layer), then
     `index_topk_freq` f with `index_skip_topk_offset` o: layer i is full iff max(i − o + 1, 0) is a
     multiple of f. `mlp_layer_types` wins over `first_k_dense_replace`.
Not here: what a layer does.
"""

from __future__ import annotations

from typing import cast

from gnomon.models.config import Family, IndexerType, MlpType
from gnomon.models.config_fields import Fields

# transformers <= 5.17 and the hub write the first, >= 5.18 the second; both mean every layer here.
SPARSE_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")
DEFAULT_OFFSET = 2


def read_mlp_types(fields: Fields, num_layers: int, num_extra: int) -> tuple[MlpType, ...]:
    """ "dense" or "sparse" for each layer."""
    listed = fields.words("mlp_layer_types", ("dense", "sparse"))
    if listed is not None:
        cut = _cut(fields, "mlp_layer_types", listed, num_layers, num_extra)
        return cast("tuple[MlpType, ...]", cut)
    num_dense = fields.integer("first_k_dense_replace", minimum=0, default=3)
    return tuple("dense" if layer < num_dense else "sparse" for layer in range(num_layers))


def check_layer_types(fields: Fields, num_layers: int, num_extra: int) -> None:
    """Refuse a model that has a layer of another kind of attention than the indexed one."""
    listed = fields.words("layer_types", SPARSE_LAYER_TYPES)
    if listed is not None:
        _cut(fields, "layer_types", listed, num_layers, num_extra)


def read_indexer_types(
    fields: Fields, family: Family, num_layers: int, num_extra: int
) -> tuple[IndexerType, ...]:
    """ "full" or "shared" for each layer; the first is always full."""
    name, types = _indexer_rule(fields, num_layers, num_extra)
    if types[0] == "shared":
        remedy = "No layer comes before layer 0 whose selection it could share."
        raise fields.error(name, "a rule by which layer 0 is full", remedy)
    if family is Family.DEEPSEEK_V32 and "shared" in types:
        remedy = "In deepseek_v32 every layer has an indexer; sharing belongs to glm_moe_dsa."
        raise fields.error(name, "a rule by which every layer is full", remedy)
    return cast("tuple[IndexerType, ...]", types)


def _indexer_rule(fields: Fields, num_layers: int, num_extra: int) -> tuple[str, tuple[str, ...]]:
    """The field that decides, and what it says layer by layer."""
    listed = fields.words("indexer_types", ("full", "shared"))
    if listed is not None:
        return "indexer_types", _cut(fields, "indexer_types", listed, num_layers, num_extra)
    if fields.has("index_topk_pattern"):
        name = "index_topk_pattern"
        pattern = fields.values[name]
        if not isinstance(pattern, str) or set(pattern) - {"F", "S"}:
            raise fields.error(name, "a text of the letters F (full) and S (shared)")
        cut = _cut(fields, name, tuple(pattern), num_layers, num_extra)
        return name, tuple("full" if letter == "F" else "shared" for letter in cut)
    freq = fields.integer("index_topk_freq", default=1)
    offset = fields.integer("index_skip_topk_offset", minimum=0, default=DEFAULT_OFFSET)
    types = tuple(
        "full" if max(layer - offset + 1, 0) % freq == 0 else "shared"
        for layer in range(num_layers)
    )
    return "index_skip_topk_offset", types


def _cut(
    fields: Fields, name: str, entries: tuple[str, ...], num_layers: int, num_extra: int
) -> tuple[str, ...]:
    """The entries of the decoder's own layers, once the length is right."""
    if len(entries) not in (num_layers, num_layers + num_extra):
        allowed = f"{num_layers} entries, one per layer (num_hidden_layers)"
        raise fields.error(name, allowed, f"It has {len(entries)}.")
    return entries[:num_layers]
