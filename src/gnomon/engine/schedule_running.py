"""RunningSet: the requests that hold pages, in the order of precedence, and who gives way to whom.

In:  the queue of waiting requests and a StepDraft to fill. Out: rows in the draft; requests moved
     between the queue and the set, with the pages that they take and give back.
Rules: see engine/scheduler.py. Not here: adding and ending requests, committing steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from gnomon.cache.pages import PagePool
from gnomon.cache.prefix import Span
from gnomon.engine.request import RequestState, SortKey
from gnomon.engine.schedule_config import SchedulerConfig
from gnomon.engine.schedule_draft import StepDraft
from gnomon.engine.schedule_pages import find_prefix, grow, num_missing, start
from gnomon.engine.schedule_queue import WaitingQueue


def _precedence(state: RequestState) -> SortKey:
    return state.key


def _rank(state: RequestState) -> int:
    return state.key[0]


class RunningSet:
    """Running requests, sorted: the first is never pushed out for another one.

    Counters since the start: num_preemptions; prefix_queries and prefix_hits in tokens, and
    prompt_tokens, at the first start of a request only.
    """

    def __init__(self, config: SchedulerConfig, pages: PagePool, queue: WaitingQueue) -> None:
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self._pages = pages
        self._queue = queue
        self._max_seqs = config.max_num_seqs
        self._max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        self._reserve = math.ceil(config.reserve * pages.num_spans)
        self._is_cache_enabled = config.enable_prefix_cache
        self._running: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._running)

    def remove(self, state: RequestState) -> None:
        """It has ended: its pages go back."""
        self._running.pop(bisect_left(self._running, state.key, key=_precedence))
        self._pages.release(state.close())

    def fill(self, draft: StepDraft) -> None:
        """Rows for those who run, then for those who can start."""
        before = self.num_preemptions
        if self._continue(draft) and self.num_preemptions == before:
            self._start_waiting(draft)

    # ------------------------------------------------------------ those who run

    def _continue(self, draft: StepDraft) -> bool:
        """One row for each at least, more for prompts; False if somebody found no pages."""
        running = self._running
        place, has_pages = 0, True
        while place < len(running) and draft.rows_left > 0:
            state = running[place]
            place += 1
            num_rows = len(state.tokens) - state.num_scheduled
            if num_rows > 1:
                behind = len(running) - place
                num_rows = min(num_rows, self._max_chunk, max(1, draft.rows_left - behind))
            if num_rows <= 0:  # its next token is being computed
                if not (draft.is_ahead and state.can_run_ahead):
                    continue
                num_rows = 1
            if self._make_room(state, state.num_scheduled + num_rows):
                draft.add(state, num_rows)
            else:
                has_pages = False
        return has_pages

    def _make_room(self, state: RequestState, kv_len: int) -> bool:
        """Pages for kv_len tokens, at the cost of those behind it, or of itself if it is last."""
        while not grow(self._pages, state, kv_len):
            if self._pages.num_postponed:
                return False  # these come back when the steps that name them retire
            victim = self._running[-1]
            self._push_out(victim)
            if victim is state:
                return False
        return True

    def _push_out(self, victim: RequestState) -> None:
        """The last in order gives its pages back and waits, its tokens kept, at its old place."""
        assert victim is self._running[-1]
        self._running.pop()
        self._pages.release(victim.close())
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._queue.push(victim)

    # ------------------------------------------------------------ those who wait

    def _start_waiting(self, draft: StepDraft) -> None:
        """Start the first in the queue, and so on until one lacks rows, a seat or pages."""
        while draft.rows_left > 0:
            state = self._queue.peek()
            # A token of a step in flight may still come in for one that was pushed out.
            if state is None or state.num_in_flight:
                return
            prefix = self._make_seat(state, draft)
            if prefix is None:
                return
            self._queue.pop()
            start(self._pages, state, prefix)
            insort(self._running, state, key=_precedence)
            self._count_start(state)
            num_rows = len(state.tokens) - state.num_scheduled
            draft.add(state, min(num_rows, self._max_chunk, draft.rows_left))

    def _make_seat(self, state: RequestState, draft: StepDraft) -> list[Span] | None:
        """The prefix to start with once there are a seat and pages; None if it must wait.

        Those of a higher priority number give way, if that is enough.
        """
        while True:
            prefix = find_prefix(self._pages, state, self._is_cache_enabled)
            missing = num_missing(self._pages, state, prefix)
            reserve = self._reserve if self._running else 0
            has_seat = len(self._running) < self._max_seqs
            if has_seat and missing + reserve <= 0:
                return prefix
            first_below = bisect_right(self._running, state.key[0], key=_rank)
            below = self._running[first_below:]
            reserve = self._reserve if first_below else 0
            at_most = sum(len(other.table) for other in below)
            postponed = self._pages.num_postponed
            is_waiting_enough = has_seat and missing + reserve <= postponed
            if not below or is_waiting_enough or missing + reserve > at_most + postponed:
                return None
            victim = below[-1]
            draft.remove(victim)
            self._push_out(victim)

    def _count_start(self, state: RequestState) -> None:
        if state.num_cached_tokens >= 0:
            return  # it was pushed out, and starts again
        state.num_cached_tokens = state.num_computed
        self.prompt_tokens += state.num_prompt
        if self._is_cache_enabled and state.may_share:
            self.prefix_queries += state.num_prompt
            self.prefix_hits += state.num_computed
