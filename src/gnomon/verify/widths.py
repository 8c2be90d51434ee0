"""Widths of a random model that a cache layout can hold.

In:  a model as the user named it, fields of config.json to replace, a layout's name.
Out: further fields to replace: none where the layout fits as it is, or where the model is a folder
     (the built-in one, None, is a folder too).
Packed layouts are made for published widths (fp8_ds_mla_656 holds 512 latents and 64 rotary
columns, index_k_132 keys of 128), tiny random models are narrower. Their weights are drawn anyway,
so they are drawn wider; a width that the user gave stays, and then the engine says what it needs.
Not here: what a layout can hold (attention/layouts).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gnomon.attention.layouts import LatentDims, choose_layout
from gnomon.errors import ConfigError
from gnomon.models.random_spec import RANDOM_PREFIX, parse_random_spec
from gnomon.models.sources import parse_model_spec

PUBLISHED = (LatentDims(512, 64),)  # no family here lacks rotary columns
INDEX_KEY_WIDTH = 128


def widths_for(
    model: str | None, overrides: Mapping[str, object], kv_layout: str
) -> dict[str, object]:
    """The fields of config.json that `kv_layout` asks for (module docstring)."""
    if model is None or not model.startswith(RANDOM_PREFIX):
        return {}
    config = parse_model_spec(model, overrides=overrides).config
    own = LatentDims(config.kv_lora_rank, config.qk_rope_head_dim)
    given = {**parse_random_spec(model)[1], **overrides}
    if _fits(kv_layout, own) or not given.keys().isdisjoint(_fields(own)):
        return {}
    for dims in PUBLISHED:
        if _fits(kv_layout, dims):
            return {name: value for name, value in _fields(dims).items() if name not in given}
    return {}


def _fields(dims: LatentDims) -> dict[str, object]:
    return {
        "kv_lora_rank": dims.kv_lora_rank,
        "qk_rope_head_dim": dims.qk_rope_head_dim,
        "index_head_dim": INDEX_KEY_WIDTH,
    }


def _fits(kv_layout: str, dims: LatentDims) -> bool:
    try:
        choose_layout(kv_layout, dims, torch.float32)
    except ConfigError:
        return False
    return True
