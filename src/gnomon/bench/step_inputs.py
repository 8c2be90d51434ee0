"""Steps of a given shape without a scheduler: decode over a cache that is declared full, prefill.

In:  batch, context or prompt length, the engine's parts. Out: StepSchedules; a cache whose pages
     hold random entries, so that selection and attention read what they would read in service.
Pages are distinct per request. The entries repeat every TEMPLATE_PAGES pages, which is more than
one request of TEMPLATE_PAGES * page size tokens sees.
Not here: running and timing (step.py).
"""

from __future__ import annotations

import numpy as np
import torch

from gnomon.cache.tensors import CacheTensors
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.schedule_step import ScheduledRequest, StepSchedule

GROUP = "tokens"
TEMPLATE_PAGES = 1024
GREEDY = SamplingParams(temperature=0.0)


@torch.inference_mode()
def fill_cache(cache: CacheTensors, seed: int) -> None:
    """Write random entries into every page of every part, through its layout."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    for pool in cache.pools.values():
        layout, size = pool.layout, pool.page_size
        template = min(TEMPLATE_PAGES, pool.num_pages)
        slots = torch.arange(template * size, device=cache.device)
        values = torch.randn(
            len(slots), layout.dim, generator=generator, device=cache.device, dtype=torch.float32
        )
        layout.write(pool, slots, values)
    num_pages = cache.num_pages[GROUP]
    for start in range(TEMPLATE_PAGES, num_pages, TEMPLATE_PAGES):
        stop = min(start + TEMPLATE_PAGES, num_pages)
        cache.copy_pages(GROUP, range(stop - start), range(start, stop))


def pages_needed(batch: int, num_tokens: int, page_size: int) -> int:
    """Pages of a step, the null page included."""
    return batch * -(-num_tokens // page_size) + 1


def decode_schedule(batch: int, context: int, page_size: int, step_id: int) -> StepSchedule:
    """One token of each of ``batch`` requests that have ``context`` tokens with it."""
    held = [0] * context
    per_request = -(-context // page_size)
    items = tuple(
        ScheduledRequest(
            request=EngineRequest(
                request_id=f"decode-{place}", prompt_token_ids=held, params=GREEDY
            ),
            num_computed=context - 1,
            num_new_tokens=1,
            token_ids=[1 + place % 1000],
            pages=(_pages(place, per_request),),
            needs_sample=True,
            tokens=held,
        )
        for place in range(batch)
    )
    return StepSchedule(step_id, items, (GROUP,), batch)


def prefill_schedules(
    batch: int, length: int, page_size: int, most_tokens: int
) -> list[StepSchedule]:
    """The steps that prefill ``batch`` prompts of ``length`` tokens, as full as is allowed."""
    steps: list[StepSchedule] = []
    items: list[ScheduledRequest] = []
    room = most_tokens
    for place in range(batch):
        done = 0
        while done < length:
            taken = min(room, length - done)
            items.append(_prefill_item(place, done, taken, length, page_size))
            done, room = done + taken, room - taken
            if room == 0:
                steps.append(_step(len(steps), items))
                items, room = [], most_tokens
    return [*steps, _step(len(steps), items)] if items else steps


def _prefill_item(
    place: int, done: int, taken: int, length: int, page_size: int
) -> ScheduledRequest:
    tokens = [1 + (place + token) % 1000 for token in range(length)]
    return ScheduledRequest(
        request=EngineRequest(
            request_id=f"prefill-{length}-{place}", prompt_token_ids=tokens, params=GREEDY
        ),
        num_computed=done,
        num_new_tokens=taken,
        token_ids=tokens[done : done + taken],
        pages=(_pages(place, -(-length // page_size)),),
        needs_sample=done + taken == length,
        tokens=tokens,
    )


def _step(number: int, items: list[ScheduledRequest]) -> StepSchedule:
    num_tokens = sum(item.num_new_tokens for item in items)
    return StepSchedule(number, tuple(items), (GROUP,), num_tokens)


def _pages(place: int, per_request: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    first = 1 + place * per_request
    return np.arange(first, first + per_request, dtype=np.int32)
