"""WaitingQueue: requests that wait for a start, the next one first.

In:  RequestState values, each with a key that is distinct and smaller for who goes first.
Out: the first of them. Every operation is O(log n) amortised, and looking at the first is O(1), so
     that a step costs the same with 100 and with 10,000 waiting.
Not here: who may start (engine/scheduler.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from gnomon.engine.request import RequestState, SortKey, Status

_MIN_DEAD = 64  # below so many dead entries a clean-up is not worth it


class WaitingQueue:
    """A heap. Entries of requests that ended meanwhile stay in it until they come up or pile up."""

    __slots__ = ("_heap", "_num_live")

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, RequestState]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[RequestState]:
        return (state for _, state in self._heap if state.status is Status.WAITING)

    def push(self, state: RequestState) -> None:
        """Let it wait, at the place of its key."""
        state.status = Status.WAITING
        heapq.heappush(self._heap, (state.key, state))
        self._num_live += 1

    def peek(self) -> RequestState | None:
        """The one that goes first, left in place; None if nobody waits."""
        heap = self._heap
        while heap:
            state = heap[0][1]
            if state.status is Status.WAITING:
                return state
            heapq.heappop(heap)
        return None

    def pop(self) -> RequestState:
        """Take out the one that goes first; there must be one. The caller sets its new status."""
        state = self.peek()
        assert state is not None
        heapq.heappop(self._heap)
        self._num_live -= 1
        return state

    def discard(self, state: RequestState) -> None:
        """It has ended (status ENDED already) and waits no more."""
        assert state.status is Status.ENDED
        self._num_live -= 1
        if len(self._heap) - self._num_live > _MIN_DEAD + self._num_live:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
