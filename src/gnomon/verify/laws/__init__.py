"""All laws, in the order in which they run: what one needs of another comes first.

Out: `LAWS`, and `choose_laws`, which knows them by name.
"""

from __future__ import annotations

import difflib

from gnomon.errors import ConfigError
from gnomon.verify.law import Law
from gnomon.verify.laws import (
    batching,
    bfloat16,
    captured,
    memory,
    operators,
    reference,
    routes,
    sampling,
    text,
    transformers,
)

LAWS: tuple[Law, ...] = (
    *operators.LAWS,
    *text.LAWS,
    *transformers.LAWS,
    *bfloat16.LAWS,
    *reference.LAWS,
    *captured.LAWS,
    *routes.LAWS,
    *batching.LAWS,
    *memory.LAWS,
    *sampling.LAWS,
)


def choose_laws(names: str | None) -> tuple[Law, ...]:
    """The laws of these names (with commas), in their own order; all where there are none."""
    if names is None:
        return LAWS
    known = [law.name for law in LAWS]
    wished = [name.strip() for name in names.split(",") if name.strip()]
    for name in wished:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"no law is called {name!r}. {hint}")
    if not wished:
        raise ConfigError(f"laws is {names!r}: name at least one of {', '.join(known)}.")
    return tuple(law for law in LAWS if law.name in wished)
