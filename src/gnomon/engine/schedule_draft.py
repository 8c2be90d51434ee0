"""StepDraft: the step that the scheduler is putting together.

In:  requests with pages in place, and how many rows each gets. Out: the items of a StepSchedule.
"""

from __future__ import annotations

from gnomon.engine.request import RequestState
from gnomon.engine.schedule_step import ScheduledRequest


class StepDraft:
    """Items so far and rows left. Adding marks the rows as scheduled; removing undoes it."""

    __slots__ = ("_items", "is_ahead", "rows_left")

    def __init__(self, max_rows: int, is_ahead: bool = False) -> None:
        """`is_ahead`: rows may follow a token that a step in flight samples."""
        self.rows_left = max_rows
        self.is_ahead = is_ahead
        self._items: dict[RequestState, ScheduledRequest] = {}

    def add(self, state: RequestState, num_rows: int) -> None:
        """The next num_rows of a request, whose pages are there."""
        start = state.num_scheduled
        stop = start + num_rows
        tokens = state.tokens
        is_ahead = stop > len(tokens)
        needs_sample = stop >= len(tokens)
        self._items[state] = ScheduledRequest(
            request=state.request,
            num_computed=start,
            num_new_tokens=num_rows,
            token_ids=[0] if is_ahead else tokens[start:stop],
            pages=state.table.views,
            needs_sample=needs_sample,
            tokens=tokens,
            num_preemptions=state.num_preemptions,
            is_ahead=is_ahead,
        )
        state.num_scheduled = stop
        state.num_in_flight += 1
        state.num_pending += needs_sample
        self.rows_left -= num_rows

    def remove(self, state: RequestState) -> None:
        """Take a request out again if it is in, because it gives way to another."""
        item = self._items.pop(state, None)
        if item is not None:
            state.num_scheduled -= item.num_new_tokens
            state.num_in_flight -= 1
            state.num_pending -= item.needs_sample
            self.rows_left += item.num_new_tokens

    def items(self) -> tuple[ScheduledRequest, ...]:
        """What the step computes, in the order of starting."""
        return tuple(self._items.values())
