"""Engines whose operators are not what they should be.

In:  kernels by operator, flags.
Out: an EngineCore like that of tiny_engine.tiny_core, with those kernels in the places of the bound
     ones; everything else (witness, recordings, shadow) as the flags say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gnomon.attention.ops.operators import Operators
from gnomon.engine.assembly import put_together, survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.models.sources import open_model
from tests.engine.tiny_engine import MODEL, VOCAB


def planted_core(kernels: Mapping[str, Callable[..., Any]], **flags: Any) -> EngineCore:
    """A tiny engine with these kernels."""
    defaults = {"model": MODEL, "dtype": "float32", "num_kv_pages": 64, "block_size": 16}
    found = survey(EngineConfig.of(**{**defaults, **flags}), VOCAB)
    loaded = open_model(
        found.source,
        found.resolved.dtype,
        found.resolved.device,
        lambda _: None,
        found.resolved.max_model_len,
    )
    ops = Operators({**found.ops.kernels, **kernels})
    return EngineCore(put_together(replace(found, ops=ops), loaded))
