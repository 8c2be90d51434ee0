"""The spelling of a model that needs no file: "random:deepseek_v32,layers=4,seed=0".

In:  the text. A key is a field of config.json ("rope_parameters.factor" reaches into an object) or
     one of the short names below; a value is a JSON scalar or list, or bare words joined by "+".
Out: the family, the fields by their full names, the seed (None where the text has none).
     `ConfigError` for an unknown family or key, with the nearest known one.
Not here: what values are allowed (config_reading), the shapes that are overridden (tiny_shapes).
"""

from __future__ import annotations

import json
import re

from gnomon.errors import ConfigError
from gnomon.models.config import Family
from gnomon.models.config_fields import MAX_INTEGER, is_integer, nearest_name
from gnomon.models.config_names import CHECKED, HONOURED

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
}
SEPARATOR = re.compile(r",(?![^\[]*\])")  # a comma, unless it is inside a list
LISTS_OF_WORDS = ("mlp_layer_types", "indexer_types", "layer_types", "architectures")


def parse_random_spec(text: str) -> tuple[Family, dict[str, object], int | None]:
    """Family, fields and seed of a spec that starts with "random:"."""
    name, *settings = SEPARATOR.split(text.removeprefix(RANDOM_PREFIX))
    if name not in list(Family):
        raise ConfigError(
            f"Model '{text}': no family '{name}'. {nearest_name(name, tuple(Family))}"
        )
    fields: dict[str, object] = {}
    seed: int | None = None
    for setting in settings:
        key, equals, raw = setting.partition("=")
        field = _field_name(text, key, bool(equals))
        if field in fields or (field == "seed" and seed is not None):
            raise ConfigError(f"Model '{text}': '{key}' is given twice. Give it once.")
        value = _value(field, raw)
        if field != "seed":
            fields[field] = value
        elif is_integer(value) and 0 <= value <= MAX_INTEGER:
            seed = value
        else:
            raise ConfigError(
                f"Model '{text}': seed is {raw!r}; allowed: a whole number from 0 to {MAX_INTEGER}."
            )
    return Family(name), fields, seed


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
