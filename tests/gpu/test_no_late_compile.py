"""After warm-up nothing is compiled any more, whatever comes: no request meets a first-shape stall.

Counted are kernels that Triton makes or loads for the first time, and seconds that compilers ran
for this process: DeepGEMM starts nvcc. (Its cache on the disk is shared with tests beside.)
Requests are random in length, arrival, number of tokens and everything that can be asked of the
sampler; some prompts are computed in chunks, some share a prefix, some are scored themselves, and
the last ones decode alone.
"""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import triton

from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore, build_core
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
MODEL = "random:{name},layers=3,hidden=1024,vocab=2048,experts=16,experts_per_token=4,q_rank=512"
MOST, SEATS, CHUNK = 6144, 24, 1024
NUM_REQUESTS, NUM_PREFIXES = 40, 5
LITTLE_S = 0.5  # nvcc takes some five
WISHES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.0, 0.9),
    "top_p": (1.0, 1.0, 0.9),
    "top_k": (0, 0, 1, 50, 1500),
    "min_p": (0.0, 0.0, 0.05),
    "presence_penalty": (0.0, 0.0, 1.0),
    "frequency_penalty": (0.0, 0.0, 0.5),
    "repetition_penalty": (1.0, 1.0, 1.3),
    "logit_bias": (None, None, {7: 2.0}, {1: -100.0, 2: 3.0}),
    "min_tokens": (0, 0, 1),
    "stop_token_ids": ((), (3, 4)),
    "logprobs": (None, None, None, 0, 5, 20),
    "prompt_logprobs": (None, None, None, None, 0, 3),
}


@contextmanager
def compiled() -> Iterator[list[str]]:
    """What is compiled, or loaded from a disk, meanwhile."""
    found: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime

    def note(**given: Any) -> None:
        found.append(str(given["repr"]))

    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
        ran = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
        found += [f"compilers ran for {ran:.1f} s"] if ran > LITTLE_S else []


def requests(rng: random.Random) -> list[EngineRequest]:
    """Lengths even in their logarithm, so that short and long ones are equally many."""
    made = []
    for number in range(NUM_REQUESTS):
        length = min(MOST - 80, round(2 ** rng.uniform(0.0, 12.5)))
        family = rng.randrange(NUM_PREFIXES)  # the same tokens from the beginning on
        tokens = [(position * 7 + family) % 2000 for position in range(length)]
        names = rng.choice(([], ["temperature"], ["temperature", "top_p", "top_k"], list(WISHES)))
        params = SamplingParams(
            **{name: rng.choice(WISHES[name]) for name in names},
            seed=number,
            max_tokens=rng.randint(1, 60),
            ignore_eos=True,
        )
        made.append(EngineRequest(request_id=str(number), prompt_token_ids=tokens, params=params))
    return made


def serve(core: EngineCore, rng: random.Random) -> int:
    """All requests, a few at a time; how many steps that took."""
    waiting, steps = requests(rng), 0
    while waiting or core.has_work:
        if waiting and (rng.random() < 0.4 or not core.has_work):
            core.add([waiting.pop() for _ in range(min(len(waiting), rng.randint(1, 6)))])
        core.step()
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("provider", "layout", "name"),
    [
        ("triton", "fp8", "glm"),
        ("triton", "auto", "h128"),
        ("auto", "fp8", "h128"),
        ("auto", "auto", "h128"),
        ("auto", "fp8", "glm"),
    ],
)
def test_nothing_is_compiled_after_the_warm_up(provider: str, layout: str, name: str) -> None:
    flags: dict[str, Any] = {"attention_provider": provider, "kv_layout": layout}
    if provider == "auto":  # with what libraries there are
        flags["provider_path"] = os.environ.get("GNOMON_PROVIDER_PATH")
    config = EngineConfig.of(
        model=MODEL.format(name=name),
        device="cuda",
        max_model_len=MOST,
        max_num_seqs=SEATS,
        max_num_batched_tokens=2048,
        max_prefill_chunk=CHUNK,
        num_kv_pages=SEATS * MOST // 64 // 2,
        gpu_memory_utilization=1.0,  # other tests hold some of the device
        **flags,
    )
    with compiled() as at_start:
        core = build_core(config)
    assert at_start, "the counter counts nothing"
    with compiled() as late:
        steps = serve(core, random.Random(7))
    assert steps >= 60
    assert late == [], f"{len(late)} kernels late:\n" + "\n".join(sorted(late)[:20])
