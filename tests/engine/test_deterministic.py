"""With `deterministic` the logits of a request are the same bits alone and in any company.

Without it they are the same numbers up to rounding, which the laws of gnomon verify watch over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.engine.core import EngineCore
from gnomon.engine.messages import EngineRequest
from gnomon.engine.runner import Taps
from gnomon.errors import ConfigError, UnsupportedError
from tests.engine.tiny_engine import outputs, prompt, request, tiny_core

MODELS = ("random:deepseek_v32,layers=3", "random:glm_moe_dsa,layers=4")
NUM_NEW = 6


@dataclass
class KeepLogits:
    """Keeps the logits of every sampled row, by request and position."""

    wants_every_row: bool = False
    kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def logits(self, request_ids: Sequence[str], positions: Sequence[int], logits: Tensor) -> None:
        for name, position, row in zip(request_ids, positions, logits, strict=True):
            self.kept[name, position] = row.clone()


def logits_of(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[tuple[str, int], Tensor]:
    tap = KeepLogits()
    core.taps = Taps(logits=tap)
    outputs(core, requests)
    return tap.kept


def make(model: str, **flags: Any) -> EngineCore:
    return tiny_core(model=model, deterministic=True, enable_prefix_caching=False, **flags)


@pytest.mark.parametrize("model", MODELS)
def test_bits_alone_are_the_bits_in_company_and_in_chunks(model: str) -> None:
    lengths = (1, 5, 16, 17, 30, 64, 100)
    asked = [request(str(n), prompt(n, salt=n), NUM_NEW) for n in lengths]
    together = logits_of(make(model), asked)
    assert len(together) == len(lengths) * NUM_NEW
    core = make(model)
    for one in asked:
        for key, row in logits_of(core, [one]).items():
            assert torch.equal(row, together[key]), key
    for key, row in logits_of(make(model, max_prefill_chunk=7), asked).items():
        assert torch.equal(row, together[key]), key


def test_bits_after_a_prefix_hit_are_those_of_the_whole_prompt() -> None:
    core = tiny_core(deterministic=True)
    first = logits_of(core, [request("a", prompt(100), NUM_NEW)])
    again = logits_of(core, [request("b", prompt(100), NUM_NEW)])
    for (_, place), row in first.items():
        assert torch.equal(again["b", place], row), place


def test_a_route_of_its_own_rounding_is_refused() -> None:
    with pytest.raises(ConfigError, match="dense_route"):
        tiny_core(deterministic=True, dense_route="always_when_allowed")


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="deterministic"):
        tiny_core(deterministic=True, dtype=dtype)


def test_a_provider_without_fixed_bits_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="hang on the batch"):
        tiny_core(deterministic=True, attention_provider="reference")
