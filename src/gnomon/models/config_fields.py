"""Reading single fields of a JSON object, so that every refusal says the same four things.

In:  a mapping (config.json, a part of it, generation_config.json) and where it came from.
Out: typed values; a `ConfigError` that names the field, the value, what is allowed and a remedy.
     A field that is absent or null takes the default; without a default it is missing.
Not here: which fields there are and how they depend on each other (config_reading).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypeGuard

from gnomon.errors import ConfigError

MAX_INTEGER = 2**31 - 1
DEFAULT_REMEDY = "Take the value from the model's published config.json, or override the field."


class Fields:
    """A JSON object that is read field by field. `source` is how errors call it."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source

    def has(self, name: str) -> bool:
        """Whether the field is there with a value that is not null."""
        return self.values.get(name) is not None

    def error(self, name: str, allowed: str, remedy: str = DEFAULT_REMEDY) -> ConfigError:
        """The refusal of a field as it stands."""
        got = f"is {_shorten(self.values[name])}" if self.has(name) else "is missing"
        return ConfigError(f"{self.source}: field '{name}' {got}; allowed: {allowed}. {remedy}")

    def integer(self, name: str, *, minimum: int = 1, default: int | None = None) -> int:
        """A whole number from `minimum` to 2^31 − 1."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if is_integer(value) and minimum <= value <= MAX_INTEGER:
            return value
        raise self.error(name, f"a whole number from {minimum} to {MAX_INTEGER}")

    def number(
        self,
        name: str,
        *,
        above: float = 0.0,
        minimum: float | None = None,
        default: float | None = None,
    ) -> float:
        """A finite number greater than `above`, or from `minimum` on where that is given."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            is_allowed = value > above if minimum is None else value >= minimum
            if is_allowed:
                return float(value)
        bound = f"above {above:g}" if minimum is None else f"from {minimum:g} on"
        raise self.error(name, f"a finite number {bound}")

    def flag(self, name: str, *, default: bool) -> bool:
        """A truth value, written true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.error(name, "true or false")

    def word(self, name: str, allowed: tuple[str, ...], *, default: str | None = None) -> str:
        """One of a few words."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, str) and value in allowed:
            return value
        raise self.error(name, " or ".join(allowed))

    def words(self, name: str, allowed: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
        """A list of words (any words where `allowed` is None); None where the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        choice = "any words" if allowed is None else " or ".join(allowed)
        if not isinstance(value, list | tuple):
            raise self.error(name, f"a list of {choice}")
        for place, entry in enumerate(value):
            if not isinstance(entry, str) or (allowed is not None and entry not in allowed):
                named = f"a list of {choice} (entry {place} is {_shorten(entry)})"
                raise self.error(name, named)
        return tuple(value)

    def integers(self, name: str, *, below: int) -> tuple[int, ...]:
        """One whole number or a list of them, each from 0 to `below` − 1; () where absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        entries = value if isinstance(value, list | tuple) else [value]
        for entry in entries:
            if not is_integer(entry) or not 0 <= entry < below:
                raise self.error(name, f"a whole number below {below}, or a list of such numbers")
        return tuple(dict.fromkeys(entries))

    def section(self, name: str) -> Fields | None:
        """A nested object; None where the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return Fields(value, f"{self.source}, '{name}'")

    def require(self, name: str, allowed: tuple[object, ...], why: str) -> None:
        """Refuse a field that is there and is none of `allowed`: the code has only that one way."""
        if self.has(name) and not any(_is_same(self.values[name], value) for value in allowed):
            raise self.error(name, " or ".join(map(repr, allowed)), f"{why}.")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_same(left: object, right: object) -> bool:
    """Equality that tells true from 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def nearest_name(name: str, known: tuple[str, ...]) -> str:
    """A sentence that points from a misspelt name to the likeliest one, or lists them all."""
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(sorted(known))}."


def read_json_object(path: Path, missing: str) -> dict[str, object]:
    """The JSON object in a file. `missing` is the remedy when the file is not there."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there. {missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}. Copy the file anew.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; allowed: a JSON object.")
    return value
