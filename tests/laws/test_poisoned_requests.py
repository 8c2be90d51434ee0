"""NaN in one request's cache ends that request alone, and only once an answer hangs on it.

A NaN among the latents spoils the next row. A NaN among the index keys has no part in an answer
while a row takes all its keys; it ends the request with the first row that chooses among them, and
with the same row whichever way steps are run: eagerly, from captured graphs, overlapped, dense or
sparse, checked or not. Mates and tokens before are those of a run without NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gnomon.engine.core import EngineCore
from gnomon.engine.messages import OutputDelta
from tests.engine.graph_engine import graph_core
from tests.engine.tiny_engine import prompt, request, tokens

TOPK, PROMPT, NUM_NEW = 32, 20, 30
MODEL = f"random:deepseek_v32,layers=2,index_topk={TOPK}"
NAMES = ("good", "bad", "fine")
ARMS: dict[str, dict[str, Any]] = {
    "eager": {"has_graphs": False},
    "eager, never dense": {"has_graphs": False, "dense_route": "never"},
    "eager, checked": {"has_graphs": False, "check": "full"},
    "graphs": {},
    "graphs, overlapped": {"overlap": "on"},
    "graphs of prefill": {"captured_tokens": 128},
}


def run(core: EngineCore, part: str | None) -> dict[str, list[OutputDelta]]:
    """Three requests; after the first step the page of one is NaN in a part of layer 1."""
    core.add([request(name, prompt(PROMPT, i), NUM_NEW) for i, name in enumerate(NAMES)])
    found: dict[str, list[OutputDelta]] = {name: [] for name in NAMES}
    is_poisoned = part is None
    while core.has_work:
        for delta in core.step():
            found[delta.request_id].append(delta)
        if not is_poisoned:
            poison(core, f"layers.1.{part}")
            is_poisoned = True
        core.check_integrity()
    return found


def poison(core: EngineCore, part: str) -> None:
    (victim,) = [one for one in core._parts.scheduler._running if one.request_id == "bad"]
    pool = core._parts.cache.pools[part]
    first = int(victim.table.views[0][0]) * pool.page_size
    pool.typed()[first : first + pool.page_size] = torch.nan


@pytest.fixture(scope="module")
def clean() -> dict[str, list[int]]:
    found = run(graph_core(has_graphs=False, model=MODEL), None)
    return {name: tokens(deltas) for name, deltas in found.items()}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("part", ["latent", "index_key"])
def test_only_the_poisoned_request_ends(arm: str, part: str, clean: dict[str, list[int]]) -> None:
    found = run(graph_core(model=MODEL, **ARMS[arm]), part)
    assert {name: deltas[-1].finish_reason for name, deltas in found.items()} == {
        "good": "length",
        "bad": "error",
        "fine": "length",
    }
    for name in ("good", "fine"):
        assert tokens(found[name]) == clean[name]
    # The prompt's row gives the first token; a row of TOPK + 1 keys is the first that chooses.
    told = tokens(found["bad"])
    expected = 1 if part == "latent" else 1 + TOPK - PROMPT
    assert told == clean["bad"][:expected]
