"""The spelling of a model that needs no file: "random:deepseek_v32,layers=4,seed=0".

In:  the text. The name is a family's or an anchor's (anchor_shapes: random:h128). A key is a field
     of config.json ("rope_parameters.factor" reaches into an object) or one of the short names
     below; fp8=true gives linear layers in FP8, fp8=false takes them away. A value is a JSON scalar
     or list, or bare words joined by "+".
Out: the family, the fields by their full names, the seed (None where the text has none).
     `ConfigError` for an unknown family or key, with the nearest known one.
Not here: what values are allowed (config_reading), the shapes that are overridden (tiny_shapes,
anchor_shapes).
"""

from __future__ import annotations

import json
import re

from gnomon.errors import ConfigError
from gnomon.models.anchor_shapes import ANCHORS, anchor_shape
from gnomon.models.config import Family
from gnomon.models.config_fields import MAX_INTEGER, is_integer, nearest_name
from gnomon.models.config_names import CHECKED, HONOURED
from gnomon.models.published_shapes import FP8
from gnomon.models.tiny_shapes import tiny_shape

RANDOM_PREFIX = "random:"
SHORT_NAMES = {
    "layers": "num_hidden_layers",
    "dense_layers": "first_k_dense_replace",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "topk": "index_topk",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "max_len": "max_position_embeddings",
    "pattern": "index_topk_pattern",
    "hadamard": "index_hadamard",
    "eos": "eos_token_id",
    "rope_theta": "rope_parameters.rope_theta",
    "yarn_factor": "rope_parameters.factor",
    "fp8": "quantization_config",
}
SEPARATOR = re.compile(r",(?![^\[]*\])")  # a comma, unless it is inside a list
LISTS_OF_WORDS = ("mlp_layer_types", "indexer_types", "layer_types", "architectures")


def parse_random_spec(text: str) -> tuple[Family, dict[str, object], int | None]:
    """Family, fields and seed of a spec that starts with "random:"."""
    name, *settings = SEPARATOR.split(text.removeprefix(RANDOM_PREFIX))
    family = _family(text, name)
    fields: dict[str, object] = {}
    seed: int | None = None
    for setting in settings:
        key, equals, raw = setting.partition("=")
        field = _field_name(text, key, bool(equals))
        if field in fields or (field == "seed" and seed is not None):
            raise ConfigError(f"Model '{text}': '{key}' is given twice. Give it once.")
        value = _value(field, raw)
        if key == "fp8":
            fields[field] = _quantization(text, value)
        elif field != "seed":
            fields[field] = value
        elif is_integer(value) and 0 <= value <= MAX_INTEGER:
            seed = value
        else:
            raise ConfigError(
                f"Model '{text}': seed is {raw!r}; allowed: a whole number from 0 to {MAX_INTEGER}."
            )
    return family, fields, seed


def random_shape(text: str) -> tuple[dict[str, object], bool]:
    """The config.json object that a spec's fields change, and whether its vocabulary is a choice.

    An anchor keeps its vocabulary, a tiny shape takes the tokenizer's.
    """
    name = SEPARATOR.split(text.removeprefix(RANDOM_PREFIX))[0]
    anchor = anchor_shape(name)
    return (anchor[1], False) if anchor is not None else (tiny_shape(_family(text, name)), True)


def _family(text: str, name: str) -> Family:
    if name in list(Family):
        return Family(name)
    anchor = anchor_shape(name)
    if anchor is None:
        known = (*Family, *ANCHORS)
        raise ConfigError(f"Model '{text}': no family '{name}'. {nearest_name(name, known)}")
    return anchor[0]


def _quantization(text: str, value: object) -> dict[str, object] | None:
    if not isinstance(value, bool):
        raise ConfigError(f"Model '{text}': fp8 is {value!r}; allowed: true or false.")
    return dict(FP8) if value else None


def _field_name(text: str, key: str, has_value: bool) -> str:
    if not has_value:
        raise ConfigError(f"Model '{text}': '{key}' has no value. Write key=value,key=value.")
    field = SHORT_NAMES.get(key, key)
    known = (*HONOURED, *CHECKED, *SHORT_NAMES, "seed")
    if field.partition(".")[0] not in known or key == "model_type":
        raise ConfigError(f"Model '{text}': no field '{key}'. {nearest_name(key, known)}")
    return field


def _value(field: str, raw: str) -> object:
    """JSON where it is JSON, else words; so that index_topk_pattern=FFS needs no quotes."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.split("+") if field in LISTS_OF_WORDS else raw
