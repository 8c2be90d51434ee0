"""StepSchedule to Batch: the tensors of one step, its geometry and its plan.

In:  the scheduler's StepSchedule (host integers, page arrays owned by the requests).
Out: a frozen Batch on the model's device. Rows stand request after request, then padding up to a
     multiple of `row_multiple`: 1, or 16 where a request's bits must not hang on its mates (on CPU
     in fp32 a product rounds by the number of its rows below 16 rows and not above).
     A step in which every request decodes one row, and which a captured graph has room for, is a
     DecodeBatch: host arrays, of which `eager()` makes the Batch if no graph may run.
BatchBuilder owns the host page tables: one line per live request, written only where pages came in.
Not here: what is scheduled (scheduler.py), the forward pass (runner.py), graphs (graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.attention.decode_plan import bucket_of
from gnomon.attention.geometry import Geometry, RowTensor, build_geometry, host_write_slots
from gnomon.attention.plan import Budget, Capabilities, StepPlan, plan_step
from gnomon.attention.routes import AttentionDims, RoutePolicy
from gnomon.attention.transforms import pad_rows
from gnomon.attention.upload import upload
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampler import SampleRow
from gnomon.engine.schedule_step import PageIds, ScheduledRequest, StepSchedule


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one request whose logits score the prompt's next tokens (prompt_logprobs)."""

    request: EngineRequest
    rows: range  # of the batch
    first: int  # position of the first token scored: that of the first row, plus one
    next_ids: tuple[int, ...]  # the tokens scored


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step, ready to run. `request_ids[b]` names request b of the geometry."""

    token_ids: RowTensor  # [R] int64, 0 for padding rows
    geometry: Geometry
    plan: StepPlan
    logit_rows: Tensor  # [M] int64: the rows that a token is sampled from
    samples: tuple[SampleRow, ...]  # M entries
    prompt_rows: tuple[PromptRows, ...]
    request_ids: tuple[str, ...]

    def eager(self) -> Batch:
        """The batch itself: it is ready to run without a graph."""
        return self


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBatch:
    """One row of each of B requests, on the host, for a captured graph of `bucket` >= B rows.

    token_ids int64 [B] and kv_len int32 [B] (the row itself included); slots int64 [B] and pages
    int32 [B, N] by cache group. Every row samples.
    """

    bucket: int
    token_ids: NDArray[np.int64]
    kv_len: NDArray[np.int32]
    slots: Mapping[str, NDArray[np.int64]]
    pages: Mapping[str, NDArray[np.int32]]
    samples: tuple[SampleRow, ...]
    request_ids: tuple[str, ...]
    eager: Callable[[], Batch]  # the same step without a graph
    prompt_rows: tuple[PromptRows, ...] = ()
    feed: NDArray[np.int64] | None = None  # [B]: as Fed.rows says of each row, -1 where it is known


@dataclass(frozen=True, slots=True, eq=False)
class Fed:
    """What the step before is sampling: token_ids int64 [M] on the device, and whose they are.

    rows: request id -> row of token_ids.
    """

    token_ids: Tensor
    rows: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What is the same for every step. `graph_rows`: the buckets of the captured graphs."""

    dims: AttentionDims
    page_size: int  # entries of a page
    device: torch.device
    row_multiple: int = 1
    graph_rows: tuple[int, ...] = ()
    policy: RoutePolicy = field(default_factory=RoutePolicy)
    capabilities: Capabilities = field(default_factory=Capabilities)
    budget: Budget = field(default_factory=Budget)


class BatchBuilder:
    """Builds batches; owns the host page tables (module docstring)."""

    def __init__(self, rules: BatchRules, groups: Sequence[str]) -> None:
        self._rules = rules
        self._tables = {group: HostPageTable() for group in groups}

    @property
    def rules(self) -> BatchRules:
        """What is the same for every step."""
        return self._rules

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended."""
        for table in self._tables.values():
            table.drop(request_id)

    def build(self, schedule: StepSchedule, fed: Fed | None = None) -> Batch | DecodeBatch:
        """The batch of a schedule that is not empty; `fed`: for its items that run ahead."""
        items = schedule.items
        bucket = bucket_of(len(items), self._rules.graph_rows)
        if bucket is None or not all(_is_plain_decode(item) for item in items):
            return self._eager(schedule, fed)
        size = self._rules.page_size
        kv_len = np.fromiter((item.kv_len for item in items), np.int32, len(items))
        pages, request = self._lines(schedule), np.arange(len(items), dtype=np.int32)
        return DecodeBatch(
            bucket=bucket,
            token_ids=np.fromiter((item.token_ids[0] for item in items), np.int64, len(items)),
            kv_len=kv_len,
            slots={
                group: host_write_slots(group, (size, 1), table, request, kv_len - 1)
                for group, table in pages.items()
            },
            pages=pages,
            samples=tuple(SampleRow(item.request, item.kv_len) for item in items),
            request_ids=tuple(item.request_id for item in items),
            eager=partial(self._eager, schedule, fed),
            feed=None if fed is None else _feed(items, fed),
        )

    def _lines(self, schedule: StepSchedule) -> dict[str, NDArray[np.int32]]:
        return {
            group: self._tables[group].lines(schedule.items, place)
            for place, group in enumerate(schedule.groups)
        }

    def _eager(self, schedule: StepSchedule, fed: Fed | None) -> Batch:
        rules, items = self._rules, schedule.items
        tables = self._lines(schedule)
        live = build_geometry(
            [item.num_new_tokens for item in items],
            [item.kv_len for item in items],
            tables,
            page_size=rules.page_size,
            label=f"step {schedule.step_id}",
            device=rules.device,
        )
        num_rows = -(-live.rows.num_rows // rules.row_multiple) * rules.row_multiple
        geometry = pad_rows(live, num_rows)
        ids = np.zeros(num_rows, dtype=np.int64)
        ids[: schedule.num_tokens] = np.fromiter(
            chain.from_iterable(item.token_ids for item in items), np.int64, schedule.num_tokens
        )
        ends = np.cumsum([item.num_new_tokens for item in items])
        sampled = [place for place, item in enumerate(items) if item.needs_sample]
        token_ids, logit_rows = upload([ids, ends[sampled] - 1], rules.device)
        if fed is not None:
            feed = _feed(items, fed)
            ahead = np.flatnonzero(feed >= 0)  # of one row each: their last is their only one
            into, source = upload([ends[ahead] - 1, feed[ahead]], rules.device)
            token_ids.index_copy_(0, into, fed.token_ids.index_select(0, source))
        return Batch(
            token_ids=RowTensor(geometry.rows, token_ids),
            geometry=geometry,
            plan=plan_step(
                geometry, rules.dims, rules.capabilities, rules.budget, policy=rules.policy
            ),
            logit_rows=logit_rows,
            samples=tuple(SampleRow(items[i].request, items[i].kv_len) for i in sampled),
            prompt_rows=_prompt_rows(items, ends),
            request_ids=tuple(item.request_id for item in items),
        )


def _feed(items: Sequence[ScheduledRequest], fed: Fed) -> NDArray[np.int64]:
    """For each item the row of `fed` that holds its token, -1 for items that do not run ahead."""
    rows = [fed.rows[item.request_id] if item.is_ahead else -1 for item in items]
    return np.array(rows, dtype=np.int64)


def _is_plain_decode(item: ScheduledRequest) -> bool:
    """One row that samples, and nothing of a prompt to score (any more)."""
    is_scored = item.num_computed >= item.num_prompt_tokens
    scores = item.request.params.prompt_logprobs is not None and not is_scored
    return item.num_new_tokens == 1 and item.needs_sample and not scores


def _prompt_rows(
    items: Sequence[ScheduledRequest], ends: NDArray[np.int64]
) -> tuple[PromptRows, ...]:
    """The rows before the prompt's last token, of requests that want their prompt scored."""
    found = []
    for item, end in zip(items, ends.tolist(), strict=True):
        stop = min(item.kv_len, item.num_prompt_tokens - 1)
        is_single = item.num_prompt_tokens == 1 and item.num_computed == 0  # scored: nothing
        if item.request.params.prompt_logprobs is None or (
            stop <= item.num_computed and not is_single
        ):
            continue
        first, start = item.num_computed + 1, end - item.num_new_tokens
        rows = range(start, start + stop - item.num_computed)
        next_ids = tuple(item.tokens[first : stop + 1])
        found.append(PromptRows(item.request, rows, first, next_ids))
    return tuple(found)


class HostPageTable:
    """int32 [lines, pages] of one cache group: a line per live request, null page 0 behind its end.

    A request's page array only grows in place or is replaced by a new one (schedule_step.py), so
    the array that a line was copied from tells what has to be copied.
    """

    def __init__(self) -> None:
        self._pages = np.zeros((8, 8), dtype=np.int32)
        self._line_of: dict[str, int] = {}
        self._free: list[int] = list(range(7, -1, -1))
        self._source: list[PageIds | None] = [None] * 8  # the array each line was copied from
        self._length: list[int] = [0] * 8

    def drop(self, request_id: str) -> None:
        """Free the line of a request, if it has one."""
        line = self._line_of.pop(request_id, None)
        if line is not None:
            self._pages[line] = 0
            self._source[line], self._length[line] = None, 0
            self._free.append(line)

    def lines(self, items: Sequence[ScheduledRequest], place: int) -> NDArray[np.int32]:
        """int32 [B, N] for the items' pages of group number `place`; N fits the longest."""
        lines = np.empty(len(items), dtype=np.int64)
        width = 0
        for index, item in enumerate(items):
            pages = item.pages[place]
            line = self._line_of.get(item.request_id)
            if line is None:
                line = self._take_line(item.request_id)
            if pages is not self._source[line]:
                self._copy(line, pages)
            lines[index] = line
            width = max(width, len(pages))
        return self._pages[lines, :width]

    def _copy(self, line: int, pages: PageIds) -> None:
        old = self._source[line]
        is_longer = old is not None and pages.base is old.base and len(pages) >= self._length[line]
        start = self._length[line] if is_longer and pages.base is not None else 0
        if len(pages) > self._pages.shape[1]:
            wider = max(len(pages), 2 * self._pages.shape[1]) - self._pages.shape[1]
            self._pages = np.pad(self._pages, ((0, 0), (0, wider)))
        self._pages[line, start : len(pages)] = pages[start:]
        self._pages[line, len(pages) : self._length[line]] = 0
        self._source[line], self._length[line] = pages, len(pages)

    def _take_line(self, request_id: str) -> int:
        if not self._free:
            height = len(self._source)
            self._pages = np.pad(self._pages, ((0, height), (0, 0)))
            self._source.extend([None] * height)
            self._length.extend([0] * height)
            self._free.extend(range(2 * height - 1, height - 1, -1))
        line = self._free.pop()
        self._line_of[request_id] = line
        return line
