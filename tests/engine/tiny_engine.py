"""Builders for engine tests: a small random engine, requests, and a run to the end.

The cache has few pages, so that an engine takes little memory and tests can count pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore, build_core
from gnomon.engine.messages import EngineRequest, OutputDelta
from gnomon.engine.sampling_params import SamplingParams

MODEL = "random:deepseek_v32,layers=2"
VOCAB = 512


def tiny_core(**flags: Any) -> EngineCore:
    """An engine in fp32 with 256 pages of 16 tokens unless the flags say otherwise."""
    defaults = {"model": MODEL, "dtype": "float32", "num_kv_pages": 256, "block_size": 16}
    return build_core(EngineConfig.of(**{**defaults, **flags}), None, VOCAB)


def prompt(length: int, salt: int = 0) -> list[int]:
    """Token ids that differ by salt from the first one on."""
    return [(37 * salt + 11 * place + place * place * 5) % VOCAB for place in range(1, length + 1)]


def request(name: str, token_ids: Sequence[int], num_new: int = 12, **fields: Any) -> EngineRequest:
    """A greedy request that ends by length alone; sampling fields and request fields by name."""
    own = {"choice", "fork_of", "priority", "cache_salt", "arrival_s", "eos_token_ids"}
    params = {"temperature": 0.0, "max_tokens": num_new}
    params |= {key: value for key, value in fields.items() if key not in own}
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(token_ids),
        params=SamplingParams(**params),
        **{key: value for key, value in fields.items() if key in own},
    )


def run(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[OutputDelta]]:
    """Add all, step until the engine is idle, check its books after every step."""
    core.add(requests)
    found: dict[str, list[OutputDelta]] = {one.request_id: [] for one in requests}
    while core.has_work:
        for delta in core.step():
            found[delta.request_id].append(delta)
        core.check_integrity()
    return found


def tokens(deltas: Sequence[OutputDelta]) -> list[int]:
    """All tokens of one request."""
    return [token for delta in deltas for token in delta.token_ids]


def outputs(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """The tokens of every request."""
    return {name: tokens(deltas) for name, deltas in run(core, requests).items()}
