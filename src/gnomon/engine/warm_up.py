"""The eager steps of an engine once, before the first request: kernels built, memory reserved.

In:  the parts of an engine.
Out: nothing but time that no request will pay: every kernel of prefill, mixed and decode steps has
     been compiled, and the allocator has held the largest step. The rows are zeros; they write to
     pages that nobody has yet, and whoever gets a page writes an entry before it reads it.
The usual shapes run eagerly, as they do where somebody listens or checks, and in graphs where
graphs take them. A ladder of others, which differ by what is compiled, runs one layer of each kind
(models/layer_kinds.py) and nothing that is captured. An engine that checks or records runs all of
them eagerly too, and operator by operator. All of it is run dry before, to compile ahead.
Not here: captured parts (their capture is their warm-up), the forms of sampling
(warm_up_sampling.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.geometry import RowTensor, build_geometry
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import plan_step
from gnomon.attention.transforms import pad_rows
from gnomon.engine.batch import Batch, BatchRules, PromptRows
from gnomon.engine.compile_ahead import compile_ahead
from gnomon.engine.messages import EngineRequest
from gnomon.engine.runner import PROMPT_SLICE, Runner
from gnomon.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from gnomon.engine.warm_up_sampling import warm_up_sampling
from gnomon.engine.warm_up_shapes import FINE_ROWS, Room, Work, ladder, mixtures, shapes

if TYPE_CHECKING:
    from gnomon.engine.assembly import Parts

logger = logging.getLogger(__name__)

MIB = 2**20
NAME = "warm-up"


def warm_up(parts: Parts, progress: Callable[[str, int, int], None]) -> None:
    """Run the shapes, then sample in every form; log what it took."""
    limits, rules = parts.scheduler.config, parts.builder.rules
    works, num_whole = _works(parts)
    batches = [_batch(rules, work, parts.scheduler.pages.groups) for work in works]
    batches[0] = _scored(batches[0])
    few = parts.runner.rehearsing()
    is_watched = parts.checker is not None or parts.witness is not None
    is_gpu = rules.device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_gpu else 0
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()  # what loading took at most is another matter

    def run_all(whole: Runner, tell: Callable[[str, int, int], None]) -> None:
        for done, batch in enumerate(batches, start=1):
            is_whole = done <= num_whole
            logits = _run(whole if is_whole else few, batch, is_whole or is_watched)
            if is_watched:
                logits = few.run(batch, ops=_parts_of(few.operators(batch.plan))).logits
            tell("warm-up", done, len(batches))
        warm_up_sampling(logits[:1], limits.max_num_seqs)

    dry = [lambda: run_all(few, lambda *_: None)]
    compile_ahead(rules.device, dry, lambda: progress("kernels of warm-up", 1, 1))
    run_all(parts.runner, progress)
    if is_gpu:
        taken = torch.cuda.max_memory_allocated() - before
        logger.info("warm-up: the largest step took %.0f MiB", taken / MIB)


def _works(parts: Parts) -> tuple[list[Work], int]:
    """All steps of the warm-up, and how many of them, the first ones, the whole model runs."""
    limits, pages, topk = parts.scheduler.config, parts.scheduler.pages, parts.builder.rules.dims
    room = Room(
        max_tokens=limits.max_num_batched_tokens,
        max_seqs=limits.max_num_seqs,
        max_len=limits.max_model_len,
        num_pages=pages.num_spans,
        page_size=pages.span_tokens,
        topk=topk.index_topk,
    )
    whole = shapes(room)
    more = _rows_of_lists(parts, room)
    rungs = ladder(room, parts.runner.most_captured, more)
    return [*whole, *rungs, *mixtures(room, more)], len(whole)


def _rows_of_lists(parts: Parts, room: Room) -> list[int]:
    """Numbers of rows that between them meet every form in which Triton attends lists."""
    from gnomon.attention.providers.triton.attention_sparse import numbers_of_rows

    attention = parts.runner.model.layers[0].attention
    query = attention.up_key.new_empty((1, attention.num_heads, attention.latent_dim))
    return numbers_of_rows(query, room.topk, min(room.fresh, FINE_ROWS))


def _run(runner: Runner, batch: Batch, both_ways: bool) -> Tensor:
    """Logits of the step as it would be run; if ``both_ways``, it is run eagerly as well."""
    logits = runner.run(batch, is_checked=False).logits
    if both_ways and runner.captures(batch):
        logits = runner.run(batch, ops=runner.operators(batch.plan), is_checked=False).logits
    return logits


def _parts_of(ops: Operators) -> Operators:
    """Operators that fuse nothing: whoever checks or records a step looks at each of them."""
    return Operators(ops.kernels, ops.providers, products=ops.products)


def _scored(batch: Batch) -> Batch:
    """The batch, whose first request wants its prompt scored: a whole slice, and one row."""
    params = SamplingParams(prompt_logprobs=MAX_LOGPROBS)
    num_rows = min(batch.geometry.requests.host.query_len[0], PROMPT_SLICE + 1)
    request = EngineRequest(request_id=NAME, prompt_token_ids=[0], params=params)
    rows = PromptRows(request, range(num_rows), 1, (0,) * num_rows)
    return replace(batch, prompt_rows=(rows,))


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
