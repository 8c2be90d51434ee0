"""Which class computes which model family, and what cache the family needs.

In:  a ModelConfig; for a model, the parameters by their internal names (models/params.py) too.
Out: a model ready to run; the schema of its cache, which needs no weights, so that pages can be
     sized or refused before any are read.
Not here: reading configs and weights (sources.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.attention.layouts.base import KVLayout
from gnomon.cache.schema import CacheSchema, GroupSpec, PartSpec
from gnomon.errors import ConfigError
from gnomon.models.config import Family, ModelConfig
from gnomon.models.indexer import index_part
from gnomon.models.linear import Param
from gnomon.models.mla import latent_part
from gnomon.models.sparse_mla_model import SparseMlaModel

# Both families are one skeleton (oracle_math.md §1.1); what differs is in their ModelConfig.
_MODELS: dict[Family, type[SparseMlaModel]] = {
    Family.DEEPSEEK_V32: SparseMlaModel,
    Family.GLM_MOE_DSA: SparseMlaModel,
}


def build_model(
    config: ModelConfig, params: Mapping[str, Param], num_positions: int | None = None
) -> SparseMlaModel:
    """Put a model together; ``num_positions`` bounds the rotary tables (default: the config's)."""
    kind = _MODELS.get(config.model_type)
    if kind is None:
        raise ConfigError(
            f"model_type is {config.model_type!r}; gnomon builds {', '.join(_MODELS)}"
        )
    return kind(config, params, num_positions or config.max_position_embeddings)


def cache_schema(
    config: ModelConfig, page_size: int, latent_layout: KVLayout, index_layout: KVLayout
) -> CacheSchema:
    """One group, "tokens": a latent a token and layer, and an index key where a layer selects."""
    parts: list[PartSpec] = []
    for layer in range(config.num_hidden_layers):
        parts.append(PartSpec(latent_part(layer), latent_layout, layer))
        if config.has_indexer(layer):
            parts.append(PartSpec(index_part(layer), index_layout, layer))
    return CacheSchema((GroupSpec("tokens", tuple(parts), page_size),))
