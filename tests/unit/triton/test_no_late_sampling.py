"""After the warm-up no sampling meets a kernel that would have to be compiled, whatever is asked.

As on a GPU, over logits on a CPU: kernels do nothing and leave the key that Triton compiles by.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gnomon.engine import sampler, sampling_edges_triton, warm_up_sampling
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampler import Sampler, SampleRow
from gnomon.engine.sampling_draw import choose_by_kernels
from gnomon.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from gnomon.engine.warm_up_sampling import STEPS, numbers_of_rows
from tests.unit.triton.launch_keys import watching

PROCESSORS = 20  # so that kernels for many rows begin with 41
NUM_STEPS = 150
CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.0, 0.3, 1.0, 2.0),
    "top_p": (1.0, 1.0, 0.9, 0.1),
    "top_k": (0, 0, 1, 40, 1000, 10**6),
    "min_p": (0.0, 0.0, 0.05, 1.0),
    "presence_penalty": (0.0, 0.0, 1.0),
    "frequency_penalty": (0.0, 0.0, -0.5),
    "repetition_penalty": (1.0, 1.0, 1.3),
    "logit_bias": (None, None, {1: -100.0}, {0: 1.0, 1: 2.0, 2: 3.0}),
    "min_tokens": (0, 0, 7),
    "stop_token_ids": ((), (1,), (1, 2)),
    "seed": (None, 0, -1, 2**62),
    "logprobs": (None, None, 0, 1, MAX_LOGPROBS),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "choose", choose_by_kernels)
    monkeypatch.setattr(warm_up_sampling, "numbers_of_rows", on_gpu)
    for module in ("topk", "index_views"):
        monkeypatch.setattr(
            f"gnomon.attention.providers.triton.{module}.num_processors", lambda device: PROCESSORS
        )
    monkeypatch.setattr(sampling_edges_triton, "num_processors", lambda device: PROCESSORS)


def on_gpu(logits: torch.Tensor, most_rows: int) -> list[int]:
    return sorted({1, most_rows, *sampling_edges_triton.numbers_of_rows(logits, most_rows)})


def random_rows(chance: random.Random, num_rows: int) -> list[SampleRow]:
    """Either all of one kind of wish, or all that there are; some far into their output."""
    names = chance.choice([[], ["temperature"], list(CHOICES)])
    rows = []
    for number in range(num_rows):
        given = {name: chance.choice(CHOICES[name]) for name in names}
        request = EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=[0, 1, 2][: chance.randint(1, 3)],
            params=SamplingParams(**given),
            choice=chance.randrange(3),
            eos_token_ids=(2,),
        )
        rows.append(SampleRow(request, len(request.prompt_token_ids) + chance.randrange(20)))
    return rows


@pytest.mark.parametrize(
    ("num_tokens", "most_rows"), [(258, 70), (5003, 70), (129280, 9), (5003, 1), (5003, 36)]
)
def test_no_mixture_launches_what_the_warm_up_did_not(num_tokens: int, most_rows: int) -> None:
    chance, late = random.Random(num_tokens), {}
    logits = torch.randn(most_rows, num_tokens, generator=torch.Generator().manual_seed(0))
    with watching() as seen:
        warm_up_sampling.warm_up_sampling(logits[:1], most_rows)
    for _ in range(NUM_STEPS if num_tokens < 10**5 else 20):
        rows = random_rows(chance, chance.choice([1, chance.randint(1, most_rows), most_rows]))
        with watching() as launched:
            Sampler(0).sample(logits[: len(rows)], rows)
        late |= dict.fromkeys(launched.keys() - seen.keys(), len(rows))
    assert len({name for name, _ in seen}) >= 5
    assert not late, "\n".join(f"{key} of {rows} rows" for key, rows in late.items())


def test_every_wish_is_among_the_forms() -> None:
    """A parameter that is new to the sampler has to be new to its warm-up."""
    usual = SamplingParams()
    asked = {
        name
        for kinds in STEPS
        for params in kinds
        for name in CHOICES
        if getattr(params, name) != getattr(usual, name)
    }
    assert asked == set(CHOICES) - {"seed"}  # a number that goes where the engine's own goes
    elsewhere = {
        "n", "max_tokens", "stop", "ignore_eos", "prompt_logprobs", "include_stop_str_in_output",
        "skip_special_tokens",
    }  # fmt: skip
    assert set(SamplingParams.__struct_fields__) == set(CHOICES) | elsewhere


def test_on_a_cpu_one_row_and_all_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbers_of_rows(torch.zeros(1, 9), 1) == [1]
    assert numbers_of_rows(torch.zeros(1, 9), 24) == [1, 24]


def test_it_would_notice() -> None:
    """Filters of many rows are not those of few."""
    logits = torch.zeros(70, 5003)
    params = SamplingParams(temperature=1.0, top_k=3)
    requests = [
        EngineRequest(request_id=f"{number}", prompt_token_ids=[0], params=params)
        for number in range(70)
    ]
    rows = [SampleRow(request, 1) for request in requests]
    with watching() as seen:
        Sampler(0).sample(logits, rows)
    with watching() as launched:
        Sampler(0).sample(logits[:1], rows[:1])
    assert launched.keys() - seen.keys()
