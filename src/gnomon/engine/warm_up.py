"""The eager steps of an engine once, before the first request: kernels built, memory reserved.

In:  the parts of an engine.
Out: nothing but time that no request will pay: every kernel of prefill, mixed and decode steps has
     been compiled, and the allocator has held the largest step. The rows are zeros; they write to
     pages that nobody has yet, and whoever gets a page writes an entry before it reads it.
The usual shapes run eagerly, as they do where somebody listens or checks, and in graphs where
graphs take them; each captured size runs in its graphs, for the attention between them.
Not here: captured parts (their capture is their warm-up).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.geometry import RowTensor, build_geometry
from gnomon.attention.plan import plan_step
from gnomon.attention.transforms import pad_rows
from gnomon.engine.batch import Batch, BatchRules
from gnomon.engine.compile_ahead import compile_ahead
from gnomon.engine.messages import EngineRequest
from gnomon.engine.runner import Runner
from gnomon.engine.sampler import Sampler, SampleRow
from gnomon.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gnomon.engine.assembly import Parts

logger = logging.getLogger(__name__)

MIB = 2**20
MATES = 8  # requests of a step with several
FINE_ROWS = 2048  # from here on any number of rows fills a GPU
Work = list[tuple[int, int]]  # (rows, tokens in the cache once they have run) of each request
NAME = "warm-up"


def shapes(
    max_tokens: int, max_seqs: int, max_len: int, pages: tuple[int, int], topk: int = 0
) -> list[Work]:
    """Steps that between them take every way: a fresh prompt, a long one's end, each with decode.

    `pages`: how many there are, and the tokens of each; no step needs more. `topk`: the longest
    prompt that may be attended densely, where that is less than a step holds.
    """
    num_pages, page_size = pages
    longest = min(max_len, num_pages * page_size)
    fresh = min(max_tokens, longest)
    num_mates = max(1, min(max_seqs, max_tokens, num_pages, MATES))
    share = min(max_len, num_pages // num_mates * page_size)
    rest = max(1, min(max_tokens - num_mates + 1, share))
    mates = [(1, share)] * (num_mates - 1)
    part = min(topk, rest)
    dense = [[(part, part), *mates]] if topk else []
    dense += [[(topk, topk)]] if 0 < topk < fresh else []
    return [
        *dense,
        [(fresh, fresh)],
        [(fresh, longest)],
        [(1, share)] * num_mates,
        [(rest, share), *mates],
    ]


def ladder(most_captured: int, max_tokens: int, longest: int, topk: int) -> list[Work]:
    """A request of ever more rows: fresh, of few rows behind all that fits, and behind ``topk``.

    Kernels differ by the rows that they have; for the last ones, by how well those fill the GPU,
    so that each number is at most an eighth above the one before.
    """
    most = min(max_tokens, longest)
    works = [[(rows, rows)] for rows in numbers(most, 4)]
    works += [[(rows, longest)] for rows in numbers(min(most, most_captured), 4)]
    works += [[(rows, min(longest, rows + topk))] for rows in numbers(min(most, FINE_ROWS), 8)]
    return works


def numbers(most: int, part: int) -> Iterator[int]:
    """2, ... up to ``most``, each larger by a ``part``-th of the one before, by one at least."""
    number = 2
    while number <= most:
        yield number
        number += max(1, number // part)


def warm_up(parts: Parts, progress: Callable[[str, int, int], None]) -> None:
    """Run the shapes, then sample as many rows as there are seats; log what it took."""
    limits, pages, rules = parts.scheduler.config, parts.scheduler.pages, parts.builder.rules
    works = shapes(
        limits.max_num_batched_tokens,
        limits.max_num_seqs,
        limits.max_model_len,
        (pages.num_spans, pages.span_tokens),
        rules.dims.index_topk,
    )
    is_gpu = rules.device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_gpu else 0
    longest = min(limits.max_model_len, pages.num_spans * pages.span_tokens)
    both_ways = len(works)
    most, topk = parts.runner.most_captured, rules.dims.index_topk
    works += ladder(most, limits.max_num_batched_tokens, longest, topk)
    batches = [_batch(rules, work, pages.groups) for work in works]

    def run_all(tell: Callable[[str, int, int], None]) -> None:
        for done, batch in enumerate(batches, start=1):
            logits = _run(parts.runner, batch, done <= both_ways)
            tell("warm-up", done, len(batches))
        _sample(logits[:1].expand(limits.max_num_seqs, -1).contiguous())

    compile_ahead(rules.device, [lambda: run_all(lambda *_: None)])
    run_all(progress)
    if is_gpu:
        taken = torch.cuda.max_memory_allocated() - before
        logger.info("warm-up: the largest step took %.0f MiB", taken / MIB)


def _run(runner: Runner, batch: Batch, both_ways: bool) -> Tensor:
    """Logits of the step as it would be run; if ``both_ways``, it is run eagerly as well."""
    logits = runner.run(batch, is_checked=False).logits
    if both_ways and runner.captures(batch):
        logits = runner.run(batch, ops=runner.operators(batch.plan), is_checked=False).logits
    return logits


def _sample(logits: Tensor) -> None:
    """Greedily, freely and filtered: each has kernels of its own."""
    for number, (temperature, top_p) in enumerate(((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))):
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=0)
        request = EngineRequest(request_id=f"{NAME} {number}", prompt_token_ids=[0], params=params)
        Sampler(0).sample(logits, [SampleRow(request, 1)] * logits.shape[0])


def _batch(rules: BatchRules, work: Work, groups: Sequence[str]) -> Batch:
    """A step of zeros; its requests hold pages 1, 2, ..., one after another."""
    first, pages = 1, []
    for _, length in work:
        count = -(-length // rules.page_size)
        pages.append(np.arange(first, first + count, dtype=np.int32))
        first += count
    live = build_geometry(
        [rows for rows, _ in work],
        [length for _, length in work],
        {group: pages for group in groups},
        page_size=rules.page_size,
        label=NAME,
        device=rules.device,
    )
    num_rows = -(-live.rows.num_rows // rules.row_multiple) * rules.row_multiple
    geometry = pad_rows(live, num_rows)
    ends = torch.tensor([rows for rows, _ in work]).cumsum(0) - 1
    return Batch(
        token_ids=RowTensor(
            geometry.rows, torch.zeros(num_rows, dtype=torch.int64, device=geometry.rows.device)
        ),
        geometry=geometry,
        plan=plan_step(geometry, rules.dims, rules.capabilities, rules.budget, policy=rules.policy),
        logit_rows=ends.to(geometry.rows.device),
        samples=(),
        prompt_rows=(),
        request_ids=tuple(f"{NAME} {place}" for place in range(len(work))),
    )
