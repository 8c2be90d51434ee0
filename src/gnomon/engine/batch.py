"""StepSchedule to Batch: the tensors of one step, its geometry and its plan.

In:  the scheduler's StepSchedule (host integers, page arrays owned by the requests).
Out: a frozen Batch on the model's device. Rows stand request after request, then padding up to a
     multiple of `row_multiple`: 1, or 16 where a request's bits must not hang on its mates (on CPU
     in fp32 a product rounds by the number of its rows below 16 rows and not above).
BatchBuilder owns the host page table: one line per live request, written only where pages came in.
Not here: what is scheduled (scheduler.py), the forward pass (runner.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.attention.geometry import Geometry, RowTensor, build_geometry
from gnomon.attention.plan import Budget, Capabilities, StepPlan, plan_step
from gnomon.attention.routes import AttentionDims, RoutePolicy
from gnomon.attention.transforms import pad_rows
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


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What is the same for every step."""

    dims: AttentionDims
    page_size: int  # entries of a page
    device: torch.device
    row_multiple: int = 1
    policy: RoutePolicy = field(default_factory=RoutePolicy)
    capabilities: Capabilities = field(default_factory=Capabilities)
    budget: Budget = field(default_factory=Budget)


class BatchBuilder:
    """Builds batches; owns the host page tables (module docstring)."""

    def __init__(self, rules: BatchRules, groups: Sequence[str]) -> None:
        self._rules = rules
        self._tables = {group: HostPageTable() for group in groups}

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended."""
        for table in self._tables.values():
            table.drop(request_id)

    def build(self, schedule: StepSchedule) -> Batch:
        """The batch of a schedule that is not empty."""
        rules, items = self._rules, schedule.items
        tables = {
            group: self._tables[group].lines(items, place)
            for place, group in enumerate(schedule.groups)
        }
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
        return Batch(
            token_ids=RowTensor(geometry.rows, torch.from_numpy(ids).to(rules.device)),
            geometry=geometry,
            plan=plan_step(
                geometry, rules.dims, rules.capabilities, rules.budget, policy=rules.policy
            ),
            logit_rows=torch.from_numpy(ends[sampled] - 1).to(rules.device),
            samples=tuple(SampleRow(items[i].request, items[i].kv_len) for i in sampled),
            prompt_rows=_prompt_rows(items, ends),
            request_ids=tuple(item.request_id for item in items),
        )


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
