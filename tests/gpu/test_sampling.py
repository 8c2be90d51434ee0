"""Sampling on a GPU: the CPU's tokens for all kinds of parameters, alone and in company.

The oracle is the same sampler on the CPU, which plain loops check (tests/unit/engine). Widths are
the vocabularies of V3.2 and of tiny models.
"""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch

from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampler import Sampler, SampleRow
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.step_checks import row_flags

pytestmark = pytest.mark.gpu

KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 700, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1e-4, "top_k": 300},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {3: 4.0}},
    {"temperature": 0.0, "frequency_penalty": 1.0, "min_tokens": 9, "stop_token_ids": [5]},
    {"temperature": 0.0, "logprobs": 5},
]


def rows_of(kinds: list[dict[str, object]], count: int) -> list[SampleRow]:
    """`count` requests that take the kinds in turn, each at a position of its own."""
    rows = []
    for number, kind in zip(range(count), itertools.cycle(kinds)):
        params = SamplingParams(seed=number * 0x9E37_79B9_7F4A_7C15 % 2**63, **kind)
        request = EngineRequest(
            request_id=f"r{number}", prompt_token_ids=[1, 2, 3], params=params, choice=number % 3
        )
        rows.append(SampleRow(request, 3 + 7 * number))
    return rows


def random_logits(num_rows: int, num_tokens: int, spread: float, grain: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens + num_rows)
    logits = torch.randn(num_rows, num_tokens, generator=generator) * spread
    return (logits / grain).round() * grain if grain else logits


@pytest.mark.parametrize("num_tokens", [258, 32768, 129280])
@pytest.mark.parametrize("spread", [0.1, 2.5, 8.0])
@pytest.mark.parametrize("grain", [0.0, 0.0625])
@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1], KINDS[1:4]], ids=["mixed", "greedy", "free"])
def test_tokens_are_those_of_the_cpu(num_tokens, spread, grain, kinds):
    logits = random_logits(15, num_tokens, spread, grain)
    rows = rows_of(kinds, 15)
    here, there = Sampler(0), Sampler(0)
    on_gpu = logits.cuda()
    for _ in range(2):  # the second time penalties have something to count
        expected = here.sample(logits, rows)
        found = there.sample(on_gpu, rows)
        assert found.token_ids == expected.token_ids
        assert found.errors == expected.errors
    assert torch.equal(on_gpu.cpu(), logits)


def test_company_changes_nothing():
    logits = random_logits(45, 32768, 3.0, 0.0).cuda()
    rows = rows_of(KINDS, 45)
    together = Sampler(0).sample(logits, rows).token_ids
    alone = [Sampler(0).sample(logits[i : i + 1], [row]).token_ids[0] for i, row in enumerate(rows)]
    assert list(together) == alone


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:4]], ids=["greedy", "free"])
def test_rows_without_a_likeliest_token_fail_alone(kinds):
    logits = random_logits(6, 5000, 1.0, 0.0)
    logits[1, 4999], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    logits[4] = math.nan
    sampled = Sampler(0).sample(logits.cuda(), rows_of(kinds, 6))
    assert [error is None for error in sampled.errors] == [True, False, False, False, False, True]
    assert all(0 <= token < 5000 for token in sampled.token_ids)


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS], ids=["greedy", "mixed"])
def test_launch_waits_for_nothing_and_can_be_captured(kinds):
    logits = random_logits(64, 129280, 2.0, 0.0).cuda()
    rows, sampler = rows_of(kinds, 64), Sampler(0)
    sampler.launch(logits, rows)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.launch(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if kinds is KINDS:  # uploads from fresh memory are not captured
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pending = sampler.launch(logits, rows)
    graph.replay()
    assert torch.equal(pending.token_ids, logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flags_of_rows(dtype):
    hidden = torch.randn(300, 7168).to(dtype)
    hidden[7, 7167], hidden[8, 0], hidden[9] = math.nan, -math.inf, torch.finfo(dtype).max
    nan_rows = torch.rand(300) < 0.5
    found = row_flags(hidden.cuda(), nan_rows.cuda())
    assert torch.equal(found.cpu(), row_flags(hidden, nan_rows))
