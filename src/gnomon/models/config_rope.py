"""Rotary fields of a config.json, in either of the two spellings in use, to a `RopeConfig`.

In:  the top-level fields. DeepSeek's hub files write `rope_theta` and `rope_scaling` (with `type`);
     GLM's, and everything that transformers 5 writes, nest all of it in `rope_parameters`.
Out: `RopeConfig`. Two spellings that contradict each other are refused, and so is any rotary field
     that is not known: a rotation that is not applied gives fluent nonsense (bugs.md H2).
Maths: oracle_math §1.4. cos and sin are multiplied by mscale(factor, mscale) / mscale(factor,
     mscale_all_dim) where both are given, else by mscale(factor, 1), as transformers does.
Not here: angles and tables.
"""

from __future__ import annotations

from gnomon.models.config import RopeConfig, YarnConfig, yarn_mscale
from gnomon.models.config_fields import Fields

YARN_FIELDS = (
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "attention_factor", "truncate",
)  # fmt: skip
KNOWN = ("rope_theta", "rope_type", "type", "partial_rotary_factor", *YARN_FIELDS)
TYPES = ("default", "yarn")


def read_rope(fields: Fields) -> RopeConfig:
    """The rotary embedding of a model. `ConfigError` if it is missing, unknown or contradictory."""
    rope = _merge_spellings(fields)
    for name in rope.values:
        if name not in KNOWN:
            known = ", ".join(sorted(KNOWN))
            raise rope.error(name, f"no such field (known: {known})", "Remove it.")
    rope.require("partial_rotary_factor", (1.0,), "the whole rope slice of a head is rotated")
    theta = rope.number("rope_theta", above=1.0)
    if _rope_type(rope) == "yarn":
        return RopeConfig(theta=theta, yarn=_read_yarn(rope))
    for name in YARN_FIELDS:
        if rope.has(name):
            raise rope.error(name, "nothing, where rope_type is default", "Set rope_type to yarn.")
    return RopeConfig(theta=theta, yarn=None)


def _merge_spellings(fields: Fields) -> Fields:
    """`rope_scaling`, `rope_parameters` and the top-level theta as one object."""
    merged: dict[str, object] = {}
    for section in ("rope_scaling", "rope_parameters"):
        nested = fields.section(section)
        for name, value in nested.values.items() if nested else ():
            if merged.get(name, value) != value:
                raise fields.error(section, f"{name} {merged[name]!r} as in 'rope_scaling'")
            merged[name] = value
    for name in ("rope_theta", "partial_rotary_factor"):
        if fields.has(name):
            if merged.get(name, fields.values[name]) != fields.values[name]:
                allowed = f"{merged[name]!r}, as the nested rotary fields say"
                raise fields.error(name, allowed, "Keep one of the two.")
            merged[name] = fields.values[name]
    return Fields(merged, f"{fields.source}, rotary fields")


def _rope_type(rope: Fields) -> str:
    old = rope.word("type", TYPES, default="default")
    new = rope.word("rope_type", TYPES, default=old)
    if rope.has("type") and old != new:
        raise rope.error("type", f"{new!r}, as 'rope_type' says", "Keep one of the two.")
    return new


def _read_yarn(rope: Fields) -> YarnConfig:
    factor = rope.number("factor", minimum=1.0)
    fast = rope.number("beta_fast", default=32.0)
    slow = rope.number("beta_slow", default=1.0)
    if slow >= fast:
        raise rope.error("beta_slow", f"a number below beta_fast ({fast:g})")
    mscale = rope.number("mscale", minimum=0.0, default=0.0)
    all_dim = rope.number("mscale_all_dim", minimum=0.0, default=0.0)
    if mscale and all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    else:
        attention_factor = yarn_mscale(factor, 1.0)
    return YarnConfig(
        factor=factor,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=fast,
        beta_slow=slow,
        mscale_all_dim=all_dim,
        attention_factor=rope.number("attention_factor", default=attention_factor),
        truncate=rope.flag("truncate", default=True),
    )
