"""Small engines for cases that need one: T0 or T2 weights, pages of 4 tokens, a clean cache.

In:  flags of EngineConfig. Out: an EngineCore whose books are checked after every step by
     tests/engine/tiny_engine.run. Not here: the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore, build_core
from gnomon.engine.messages import EngineRequest
from tests.engine.tiny_engine import VOCAB, outputs, prompt, request, run, tokens
from tests.laws.bugs.tiny import t0_spec

__all__ = ["VOCAB", "bug_core", "cold_outputs", "outputs", "prompt", "request", "run", "tokens"]


def bug_core(kind: str = "T0", fields: Mapping[str, Any] | None = None, **flags: Any) -> EngineCore:
    """An engine over a tiny model of 512 tokens, 128 pages of 4 unless the flags say otherwise."""
    spec = t0_spec(kind, **{"vocab": VOCAB, **(fields or {})})
    defaults = {"model": spec, "dtype": "float32", "num_kv_pages": 128, "block_size": 4}
    return build_core(EngineConfig.of(**{**defaults, **flags}))


def cold_outputs(core: EngineCore, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """The tokens of each request, run by itself on a cache that remembers nothing."""
    found = {}
    for one in requests:
        core.reset_prefix_cache()
        found |= outputs(core, [one])
    core.reset_prefix_cache()
    return found
