"""Sampling in every form that a request may ask for, once, before the first request.

In:  logits of one row, how many rows a step may sample.
Out: nothing but compiled and loaded kernels, and memory held once at its largest.
Forms are what sampler.py launches differently: no noise, noise, noise with filters, edits of the
logits (bias, penalties, bans), log-probabilities; alone, as clients mostly ask, and in one step.
Tokens and states are thrown away.
Not here: the steps before the sampler, and scores of prompts (warm_up.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from torch import Tensor

from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampler import Sampler, SampleRow
from gnomon.engine.sampling_params import MAX_LOGPROBS, SamplingParams

PROMPT = 4  # tokens; the ids 0 and 1 are in every vocabulary
GREEDY = SamplingParams(temperature=0.0)
FREE = SamplingParams(temperature=1.0)
FILTERED = (
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01),
)
EDITED = (
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, min_tokens=8, stop_token_ids=(1,)),
)
SCORED = (
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=1.0, logprobs=MAX_LOGPROBS),
)
STEPS: tuple[Sequence[SamplingParams], ...] = (
    (GREEDY,),
    (FREE,),
    FILTERED,
    (*EDITED, GREEDY),
    SCORED,
    (*SCORED, *EDITED, *FILTERED, FREE, GREEDY),
)
"""What the rows of one step ask for, in turn."""


def warm_up_sampling(logits: Tensor, most_rows: int) -> None:
    """Sample every form at every number of rows that makes a difference; logits [1, V]."""
    for num_rows in reversed(numbers_of_rows(logits, most_rows)):
        shared = logits.expand(num_rows, -1).contiguous()
        for kinds in STEPS:
            Sampler(0).sample(shared, list(islice(_rows(kinds), num_rows)))


def numbers_of_rows(logits: Tensor, most_rows: int) -> list[int]:
    """Ascending: one, all, and what lies between where kernels depend on the number."""
    found = {1, most_rows}
    if logits.is_cuda:
        from gnomon.engine.sampling_edges_triton import numbers_of_rows as of_filters

        found |= set(of_filters(logits, most_rows))
    return sorted(found)


def _rows(kinds: Sequence[SamplingParams]) -> Iterator[SampleRow]:
    """Rows without end that take the kinds in turn, each of a request of its own."""
    for number, params in enumerate(cycle(kinds)):
        request = EngineRequest(
            request_id=f"sample {number}",
            prompt_token_ids=[0] * PROMPT,
            params=params,
            eos_token_ids=(0,),
        )
        yield SampleRow(request, PROMPT)
