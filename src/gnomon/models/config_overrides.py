"""Put a user's wish in the place of a field of config.json.

In:  the JSON object, a field's name and a value.
Out: the object changed, as if the file said so. An object is merged into the one that is there, and
     "outer.inner" reaches into it. Other spellings of the same field give way: the wish wins.
     `ConfigError` for a name that changes nothing, with the nearest one that does.
Not here: whether the value is allowed (config_reading).
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.errors import ConfigError
from gnomon.models.config_fields import nearest_name
from gnomon.models.config_names import CHECKED, HONOURED

SPELLINGS = (
    ("torch_dtype", "dtype"),
    ("n_routed_experts", "num_local_experts", "num_experts"),
)
ROTARY_FIELDS = ("rope_theta", "rope_parameters", "rope_scaling")


def apply_override(values: dict[str, object], key: str, value: object) -> None:
    """Put one override in place."""
    outer, _, inner = key.partition(".")
    known = (*HONOURED, *CHECKED)
    if outer not in known:
        raise ConfigError(f"Override '{key}' is no field of a model. {nearest_name(outer, known)}")
    if inner:
        value = {inner: value}
    if outer in ROTARY_FIELDS:
        wish = value if isinstance(value, Mapping) else {outer: value}
        _drop_rotary(values, {str(name) for name in wish})
    for names in SPELLINGS:
        if outer in names:
            for name in names:
                values.pop(name, None)
    there = values.get(outer)
    if isinstance(there, Mapping) and isinstance(value, Mapping):
        value = {**there, **value}
    values[outer] = value


def _drop_rotary(values: dict[str, object], names: set[str]) -> None:
    """Take rotary fields out of both objects that may hold them, and out of the top level."""
    if names & {"type", "rope_type"}:
        names = names | {"type", "rope_type"}
    for holder in ("rope_parameters", "rope_scaling"):
        nested = values.get(holder)
        if isinstance(nested, Mapping):
            values[holder] = {key: old for key, old in nested.items() if key not in names}
    if "rope_theta" in names:
        values.pop("rope_theta", None)
