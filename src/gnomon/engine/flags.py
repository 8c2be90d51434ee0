"""Flags declared as annotated fields of frozen dataclasses: the one source of CLI, help and docs.

In:  a dataclass whose fields read `name: Annotated[type, Flag("help", ...)] = default`.
Out: `flag_specs(cls)`, one FlagSpec per field; `check_flags(self)`, for `__post_init__`: type,
     choices and range of every field; `from_flags(cls, flags)`, which refuses unknown names.
Errors: ConfigError with field, value, what is allowed and the nearest known name.
Types: str, int, float, bool, dict (JSON), each also with `| None`.
Not here: parsing of command lines (cli), what the flags mean (config.py and others).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from gnomon.errors import ConfigError

Value = str | int | float | bool | dict[str, Any] | None
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flag:
    """Help text of a field and how it is spelled and bounded on the command line."""

    help: str
    spellings: tuple[str, ...] = ()  # further flags for the same field, such as "-tp"
    choices: tuple[str, ...] = ()
    least: float | None = None
    greatest: float | None = None


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One field of EngineConfig as the CLI and the docs need it."""

    name: str  # "max_model_len"
    spellings: tuple[str, ...]  # ("--max-model-len", ...)
    type: type  # str, int, float, bool or dict (JSON)
    is_optional: bool  # None is a value: "decide for me"
    default: Value
    help: str
    choices: tuple[str, ...]


def flag_specs(cls: type) -> tuple[FlagSpec, ...]:
    """One FlagSpec per field, in the order of the fields."""
    return tuple(spec for spec, _ in _annotated_fields(cls))


def check_flags(values: object) -> None:
    """Check every field of an instance of an annotated dataclass."""
    for spec, flag in _annotated_fields(type(values)):
        _check(spec, flag, getattr(values, spec.name))


def given_flags(values: object) -> Mapping[str, Value]:
    """The fields that differ from their default."""
    return {
        spec.name: getattr(values, spec.name)
        for spec in flag_specs(type(values))
        if getattr(values, spec.name) != spec.default
    }


def from_flags(cls: type[T], flags: Mapping[str, Any]) -> T:
    """cls(**flags); an unknown name is refused with the nearest known one."""
    known = [spec.name for spec in flag_specs(cls)]
    for name in flags:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"unknown option {name!r}. {hint}")
    return cls(**flags)


def _annotated_fields(cls: type) -> Iterator[tuple[FlagSpec, Flag]]:
    hints = get_type_hints(cls, include_extras=True)
    for entry in fields(cls):
        declared, flag = get_args(hints[entry.name])
        arms = get_args(declared) if isinstance(declared, UnionType) else (declared,)
        is_dict = entry.default_factory is not MISSING
        spec = FlagSpec(
            name=entry.name,
            spellings=("--" + entry.name.replace("_", "-"), *flag.spellings),
            type=get_origin(arms[0]) or arms[0],
            is_optional=type(None) in arms,
            default={} if is_dict else cast(Value, entry.default),
            help=flag.help,
            choices=flag.choices,
        )
        yield spec, flag


def _check(spec: FlagSpec, flag: Flag, value: Any) -> None:
    """Type, choices and range of one value."""
    if value is None and spec.is_optional:
        return
    accepted: tuple[type, ...] = (int, float) if spec.type is float else (spec.type,)
    if (isinstance(value, bool) and spec.type is not bool) or type(value) not in accepted:
        raise ConfigError(
            f"{spec.name} is {value!r} ({type(value).__name__}): it has to be of type "
            f"{spec.type.__name__}{' or None' if spec.is_optional else ''}."
        )
    if flag.choices and value not in flag.choices:
        near = difflib.get_close_matches(str(value), flag.choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{spec.name} is {value!r}: allowed are {', '.join(flag.choices)}.{hint}")
    too_small = flag.least is not None and not value >= flag.least
    too_great = flag.greatest is not None and not value <= flag.greatest
    if too_small or too_great:
        bounds = (
            f"at least {flag.least}"
            if flag.greatest is None
            else (f"between {flag.least} and {flag.greatest}")
        )
        raise ConfigError(f"{spec.name} is {value!r}: it has to be {bounds}.")
