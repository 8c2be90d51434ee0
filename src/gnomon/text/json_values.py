"""JSON that came from outside: how deep it may be, that it is text, and how it is written out.

In:  decoded JSON, or the JSON text of a tool call's arguments.
Out: the same value, checked; JSON text in the spelling that the models were trained on.
Errors: RequestError with the place at fault in `param`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from gnomon.errors import RequestError

MAX_NESTING = 64
"""Levels of lists and objects in a tool, its arguments, a schema or template arguments."""


def check_value(value: object, param: str) -> None:
    """RequestError if the value nests too deeply, is not JSON, or holds a lone surrogate."""
    level: list[object] = [value]
    for _ in range(MAX_NESTING + 1):
        level = [inner for outer in level for inner in _inner(outer, param)]
        if not level:
            return
    raise RequestError(
        f"{param} nests more than {MAX_NESTING} levels of lists and objects; flatten it",
        param=param,
        code="too_deeply_nested",
    )


def check_text(text: str, param: str) -> None:
    """RequestError if the text holds a lone surrogate: no tokenizer can take it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise RequestError(
            f"{param} holds a lone surrogate, {text[fault.start]!a}, at character "
            f"{fault.start}: it is not Unicode text; send valid UTF-8",
            param=param,
            code="invalid_unicode",
        ) from fault


def parse_object(text: str, param: str) -> dict[str, Any]:
    """The JSON object that a text holds; RequestError for anything else, NaN among it."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as fault:
        raise RequestError(
            f"{param} is not the text of a JSON object: {fault}", param=param
        ) from fault
    if not isinstance(value, dict):
        raise RequestError(
            f"{param} holds a JSON {type(value).__name__}; an object is expected", param=param
        )
    check_value(value, param)
    return value


def to_json(value: object) -> str:
    """One line of JSON, spaces after commas and colons, characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _inner(value: object, param: str) -> list[object]:
    """What a list or an object holds; a leaf is checked and holds nothing."""
    if isinstance(value, str):
        check_text(value, param)
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{param} has the key {key!r}; keys are texts", param=param)
            check_text(key, param)
        return list(value.values())
    elif isinstance(value, list | tuple):
        return list(value)
    elif value is not None and not isinstance(value, bool | int | float):
        raise RequestError(f"{param} holds a {type(value).__name__}, not JSON", param=param)
    return []


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
