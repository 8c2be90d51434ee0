"""Scheduler: which tokens of which requests the next step computes. Pure Python, no tensors.

In:  requests (`add`), wishes to end them (`abort`, `fail`), and what a step sampled (`commit`).
Out: StepSchedule, one per step; OutputDelta, what a committed step added to each request.

There are no phases. A request has so many tokens and so many of them computed; a step computes the
next ones. Requests that run come first, each at least one row, then waiting ones start as long as
rows, seats and pages allow. Both are kept in the order of precedence (arrival, or priority and then
arrival), and when pages run out the last of those who run gives way: its pages are released, its
tokens kept, and it waits at its old place. So nobody is pushed out by a later one, and since nobody
is let in who would not fit alone, everybody gets done.

Steps may overlap: `schedule` can be called before earlier steps are committed; rows that depend on
a token still unknown are left for later, or, if the caller can feed it (`is_ahead`), go on blindly:
a request that this token ends has then computed one row for nothing, and its pages are given back
when that step retires. Steps are committed (or failed) in the order of their ids.
A step costs O(running requests + its rows), however many wait.
Not here: tensors, sampling, stop strings, time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gnomon.cache.pages import PagePool
from gnomon.engine.messages import EngineRequest, EngineStats, FinishReason, OutputDelta
from gnomon.engine.request import RequestState, SortKey, SpanTable, Status
from gnomon.engine.schedule_admission import check_fork, check_request
from gnomon.engine.schedule_config import SchedulerConfig
from gnomon.engine.schedule_draft import StepDraft
from gnomon.engine.schedule_pages import register_full_spans
from gnomon.engine.schedule_queue import WaitingQueue
from gnomon.engine.schedule_running import RunningSet
from gnomon.engine.schedule_step import ScheduledRequest, StepSchedule
from gnomon.errors import GnomonError, OverloadError

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Owns every live request; with its parts the only one to change one, or the PagePool."""

    def __init__(self, config: SchedulerConfig, pages: PagePool) -> None:
        self.config = config
        self.pages = pages
        self._empty_table = SpanTable(pages.pages_per_span)
        self._states: dict[str, RequestState] = {}
        self._queue = WaitingQueue()
        self._running = RunningSet(config, pages, self._queue)
        self._held: dict[RequestState, list[RequestState]] = {}  # parent -> forks that wait for it
        self._num_held = 0
        self._released: list[str] = []  # ended since the last schedule
        self._num_added = 0
        self._num_steps = 0
        self._step_tokens = 0
        self._num_rejected = 0
        self._generation_tokens = 0
        self._finished: Counter[str] = Counter()

    # ------------------------------------------------------------ what is known

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, or held back for their parent's prompt."""
        return len(self._queue) + self._num_held

    @property
    def has_work(self) -> bool:
        """Whether any request is alive."""
        return bool(self._states)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all living requests, in the order they came."""
        return list(self._states)

    def stats(self) -> EngineStats:
        """Gauges and counters as they are now. O(1)."""
        running = self._running
        return EngineStats(
            running=len(running),
            waiting=self.num_waiting,
            kv_usage=self.pages.usage,
            step_tokens=self._step_tokens,
            num_steps=self._num_steps,
            num_preemptions=running.num_preemptions,
            prefix_queries=running.prefix_queries,
            prefix_hits=running.prefix_hits,
            prompt_tokens=running.prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
            rejected=self._num_rejected,
        )

    # ------------------------------------------------------------ requests come and go

    def add(self, request: EngineRequest) -> None:
        """Let a request wait for its start.

        Raises RequestError if it can never run (its id is in use, its prompt is empty or too long,
        it needs more pages than there are, it is no copy of its parent), OverloadError if the queue
        is full; then nothing has changed.
        """
        key: SortKey = (0, 0.0, self._num_added)
        if self.config.policy == "priority":
            key = (request.priority, request.arrival_s, self._num_added)
        state = RequestState(request, key, self.config.max_model_len, self._empty_table)
        check_request(state, self._states, self.config, self.pages)
        parent = self._states.get(request.fork_of) if request.fork_of is not None else None
        if parent is not None:
            check_fork(state, parent)
        self.require_room(1)
        self._num_added += 1
        self._states[request.request_id] = state
        state.parent = parent
        if parent is not None and parent.num_computed < parent.num_prompt:
            state.status = Status.HELD
            self._held.setdefault(parent, []).append(state)
            self._num_held += 1
        else:
            self._queue.push(state)

    def require_room(self, num_requests: int) -> None:
        """Raise OverloadError unless so many requests more may wait. For all choices at once."""
        if self.num_waiting + num_requests > self.config.max_queue:
            self._num_rejected += num_requests
            raise OverloadError(
                f"{self.num_waiting} requests are waiting and {num_requests} more came, but at "
                f"most {self.config.max_queue} may wait (--max-queue); try again later",
                retry_after_s=self.config.retry_after_s,
            )

    def abort(self, request_id: str) -> OutputDelta | None:
        """End a request on its client's wish; None if there is none of this id (any more)."""
        return self._end_early(request_id, "abort", None)

    def fail(self, request_id: str, message: str) -> OutputDelta | None:
        """End a request for a fault of its own, before the commit of the step that showed it."""
        return self._end_early(request_id, "error", message)

    def _end_early(
        self, request_id: str, reason: FinishReason, message: str | None
    ) -> OutputDelta | None:
        state = self._states.get(request_id)
        if state is None:
            return None
        self._end(state, reason)
        return OutputDelta(
            request_id=request_id,
            finish_reason=reason,
            num_cached_tokens=max(0, state.num_cached_tokens),
            num_prompt_tokens=state.num_prompt,
            error=message,
        )

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        before, state.status = state.status, Status.ENDED
        if before is Status.RUNNING:
            self._running.remove(state)
        elif before is Status.WAITING:
            self._queue.discard(state)
        else:
            assert state.parent is not None
            self._held[state.parent].remove(state)
            self._num_held -= 1
        state.parent = None
        self._let_forks_go(state)
        del self._states[state.request_id]
        self._released.append(state.request_id)
        self._finished[reason] += 1

    def _let_forks_go(self, parent: RequestState) -> None:
        for fork in self._held.pop(parent, ()):
            self._num_held -= 1
            self._queue.push(fork)

    # ------------------------------------------------------------ steps

    def schedule(self, is_ahead: bool = False) -> StepSchedule:
        """The next step; empty if nothing can be computed now.

        `is_ahead`: requests whose next token a step in flight samples may go on, one row each,
        unless that token or their parameters must be known first.
        """
        draft = StepDraft(self.config.max_num_batched_tokens, is_ahead)
        self._running.fill(draft)
        items = draft.items()
        self._step_tokens = self.config.max_num_batched_tokens - draft.rows_left
        released, self._released = tuple(self._released), []
        if items:
            self._num_steps += 1
            self.pages.begin_step(self._num_steps)
        return StepSchedule(
            step_id=self._num_steps,
            items=items,
            groups=self.pages.groups,
            num_tokens=self._step_tokens,
            released=released,
        )

    def commit(self, step: StepSchedule, sampled: Mapping[str, Sequence[int]]) -> list[OutputDelta]:
        """A step has run: its rows are in the cache, and these tokens came out of it.

        sampled: request_id -> the tokens it gained, at least one, for each item that needs a sample
        and has not been aborted or failed meanwhile; others are ignored. Tokens behind the one that
        ends a request are dropped. Returns a delta per request that gained tokens.
        """
        if step.is_empty:
            return []
        alive = [(item, state) for item in step.items if (state := self._state_of(item))]
        for item, _ in alive:
            if item.needs_sample and not sampled.get(item.request_id):
                raise GnomonError(
                    f"step {step.step_id} samples a token for request {item.request_id!r}, but "
                    "none came; commit one, or fail the request first"
                )
        self.pages.retire_step(step.step_id)
        deltas = []
        for item, state in alive:
            state.num_in_flight -= 1
            state.num_pending -= item.needs_sample
            if state.num_preemptions == item.num_preemptions:  # else it starts from nothing again
                self._advance(state, item.kv_len)
            if item.needs_sample:
                deltas.append(self._take(state, sampled[item.request_id]))
        return deltas

    def fail_step(self, step: StepSchedule, message: str) -> list[OutputDelta]:
        """A step could not be run: end all of its requests, with a delta each. Others go on."""
        if step.is_empty:
            return []
        self.pages.retire_step(step.step_id)
        ids = [item.request_id for item in step.items if self._state_of(item)]
        return [delta for request_id in ids if (delta := self.fail(request_id, message))]

    def is_alive(self, request: EngineRequest) -> bool:
        """Whether this very request has not ended."""
        state = self._states.get(request.request_id)
        return state is not None and state.request is request

    def _state_of(self, item: ScheduledRequest) -> RequestState | None:
        """The request of an item, unless it has ended (its id may be in use again)."""
        state = self._states.get(item.request_id)
        return state if state is not None and state.request is item.request else None

    def _advance(self, state: RequestState, num_computed: int) -> None:
        state.num_computed = num_computed
        if self.config.enable_prefix_cache:
            register_full_spans(self.pages, state)
        if self._held and num_computed >= state.num_prompt:
            self._let_forks_go(state)

    def _take(self, state: RequestState, token_ids: Sequence[int]) -> OutputDelta:
        taken: list[int] = []
        ending: tuple[FinishReason, int | None] | None = None
        for token_id in token_ids:
            taken.append(token_id)
            ending = state.append(token_id)
            if ending is not None:
                self._end(state, ending[0])
                break
        self._generation_tokens += len(taken)
        return OutputDelta(
            request_id=state.request_id,
            token_ids=taken,
            finish_reason=ending[0] if ending else None,
            stop_reason=ending[1] if ending else None,
            num_cached_tokens=state.num_cached_tokens,
            num_prompt_tokens=state.num_prompt,
        )

    # ------------------------------------------------------------ checks

    def check_integrity(self) -> None:
        """Raise GnomonError if queues, counts or pages disagree. For tests; slow."""
        running, queued = list(self._running), list(self._queue)
        held = [fork for forks in self._held.values() for fork in forks]
        everybody = sorted(state.key for state in [*running, *queued, *held])
        _require(everybody == sorted(s.key for s in self._states.values()), "somebody is lost")
        _require(len(queued) == len(self._queue), "the queue's length is wrong")
        _require(len(held) == self._num_held, "the number of held forks is wrong")
        keys = [state.key for state in running]
        _require(keys == sorted(set(keys)), "the running requests are out of order")
        _require(len(running) <= self.config.max_num_seqs, "too many requests run")
        for state in self._states.values():
            state.check_integrity(self.pages.span_tokens)
        self.pages.check_integrity(Counter(span for s in running for span in s.table.spans))


def _require(claim: bool, message: str) -> None:
    if not claim:
        raise GnomonError(f"the scheduler is inconsistent: {message}")
