"""RequestState: one request inside the engine, its tokens, its pages and when it ends.

Owned and changed by the Scheduler alone. Invariants:
    num_computed <= num_scheduled     committed rows; those of steps in flight too
    num_scheduled <= len(tokens) + num_pending     at most one row ahead of the tokens known
    spans cover positions [0, num_scheduled), and none are held unless the request runs
    tokens only grows: prompt, then outputs; a preempted request keeps them and computes them again
Not here: policy (engine/scheduler.py), reference counts (cache/pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np

from gnomon.cache.prefix import Span, next_digest, root_digest
from gnomon.engine.messages import EngineRequest, FinishReason
from gnomon.engine.schedule_step import PageIds
from gnomon.errors import GnomonError

SortKey = tuple[int, float, int]


class Status(Enum):
    """Where a request is: held back for its parent's prompt, in the queue, running, or gone."""

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class SpanTable:
    """The spans of one request in the order of its tokens, and their page ids as growing arrays.

    `views` holds one int32 array per group, cut to the pages there are. A view that was handed out
    keeps its values: growing writes behind it or moves to new memory, and replacing copies first.
    """

    __slots__ = ("_arrays", "_pages_per_span", "spans", "views")

    def __init__(self, pages_per_span: tuple[int, ...]) -> None:
        self._pages_per_span = pages_per_span
        self.spans: list[Span] = []
        self._arrays: list[PageIds] = [np.empty(0, np.int32) for _ in pages_per_span]
        self.views: tuple[PageIds, ...] = tuple(self._arrays)

    def __len__(self) -> int:
        return len(self.spans)

    def extend(self, spans: Sequence[Span]) -> None:
        """Append spans. Amortised O(len(spans))."""
        old = len(self.spans)
        self.spans.extend(spans)
        views = []
        for group, k in enumerate(self._pages_per_span):
            array = self._arrays[group]
            used = len(self.spans) * k
            if used > len(array):
                grown = np.empty(used + used // 4 + 4, np.int32)
                grown[: old * k] = array[: old * k]
                self._arrays[group] = array = grown
            array[old * k : used] = [page for span in spans for page in span.pages[group]]
            views.append(array[:used])
        self.views = tuple(views)

    def replace(self, place: int, span: Span) -> None:
        """Put another span of equal content at a place. O(len(self))."""
        self.spans[place] = span
        views = []
        for group, k in enumerate(self._pages_per_span):
            array = self._arrays[group].copy()  # a step in flight may still read the old one
            array[place * k : (place + 1) * k] = span.pages[group]
            self._arrays[group] = array
            views.append(array[: len(self.spans) * k])
        self.views = tuple(views)


class RequestState:
    """One request: what it is, how far it has come, and what it holds.

    Until it starts it owns next to nothing, because thousands may wait: `tokens` is the prompt's
    own list, and `table` the empty one that it was made with.
    """

    __slots__ = (
        "_digests",
        "_empty_table",
        "_eos",
        "_num_output_at_limit",
        "key",
        "may_run_ahead",
        "num_cached_tokens",
        "num_computed",
        "num_in_flight",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "num_registered",
        "num_scheduled",
        "parent",
        "request",
        "status",
        "table",
        "tokens",
    )

    def __init__(
        self, request: EngineRequest, key: SortKey, max_model_len: int, empty_table: SpanTable
    ) -> None:
        params = request.params
        self.request = request
        self.key = key  # smaller runs first; distinct between requests
        self.status = Status.WAITING
        self.parent: RequestState | None = None  # fork_of, as long as it may be of use
        self.tokens: list[int] = request.prompt_token_ids
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_in_flight = 0  # steps begun and not committed that name it
        self.num_pending = 0  # tokens that steps in flight sample for it
        self.may_run_ahead = params.is_blind  # the next token may be fed on unseen
        self.num_preemptions = 0
        self.num_cached_tokens = -1  # set at the first start
        self.table = self._empty_table = empty_table
        self.num_registered = 0  # leading spans that are in the prefix index
        self._digests: list[bytes] | None = None
        self._eos = () if params.ignore_eos else request.eos_token_ids
        limit = max_model_len - self.num_prompt
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        self._num_output_at_limit = limit

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens it will ever hold in the cache: all but the very last one."""
        return self.num_prompt + self._num_output_at_limit - 1

    @property
    def may_share(self) -> bool:
        """Whether cached pages are of use: with prompt_logprobs every row must be computed."""
        return self.request.params.prompt_logprobs is None

    @property
    def can_run_ahead(self) -> bool:
        """Whether the row after its pending token may be scheduled: it will surely be wanted.

        Not if that token ends it by length; if it ends it by its value, the row is for nothing.
        """
        num_output = len(self.tokens) + 1 - self.num_prompt
        is_next = self.num_pending == 1 and self.num_scheduled == len(self.tokens)
        return self.may_run_ahead and is_next and num_output < self._num_output_at_limit

    def append(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Take one generated token; (finish_reason, stop_reason) if it ends the request.

        In this order: EOS, stop_token_ids (both only behind min_tokens tokens), then length.
        """
        self.tokens.append(token_id)
        num_output = len(self.tokens) - self.num_prompt
        if num_output > self.request.params.min_tokens:
            if token_id in self._eos:
                return "stop", None
            if token_id in self.request.params.stop_token_ids:
                return "stop", token_id
        if num_output >= self._num_output_at_limit:
            return "length", None
        return None

    def digest(self, place: int, namespace: str, span_tokens: int) -> bytes:
        """The prefix digest of its span at `place`, which must be full. Computed once."""
        digests = self._digests
        if digests is None:
            digests = self._digests = []
        while len(digests) <= place:
            start = len(digests) * span_tokens
            parent = digests[-1] if digests else root_digest(namespace, self.request.cache_salt)
            digests.append(next_digest(parent, self.tokens[start : start + span_tokens]))
        return digests[place]

    def digests(self, num_spans: int, namespace: str, span_tokens: int) -> Iterator[bytes]:
        """The digests of its leading spans, computed as they are asked for."""
        for place in range(num_spans):
            yield self.digest(place, namespace, span_tokens)

    def open(self, table: SpanTable, num_cached: int) -> None:
        """It starts, for the first time or again, with a table that covers all of its tokens.

        The first num_cached tokens are in the cache already, in whole spans.
        """
        if self.tokens is self.request.prompt_token_ids:
            self.tokens = list(self.tokens)
        self.status = Status.RUNNING
        self.parent = None
        self.table = table
        self.num_computed = self.num_scheduled = num_cached

    def close(self) -> list[Span]:
        """It runs no more, and has nothing computed; returns what it held, to be released."""
        spans = self.table.spans
        self.table = self._empty_table
        self.num_computed = self.num_scheduled = self.num_registered = 0
        return spans

    def check_integrity(self, span_tokens: int) -> None:
        """Raise GnomonError if its counts and its pages disagree."""
        table = self.table
        expected = [
            [page for span in table.spans for page in span.pages[group]]
            for group in range(len(table.views))
        ]
        is_running = self.status is Status.RUNNING
        claims = {
            "counts": 0 <= self.num_computed <= self.num_scheduled,
            "known tokens": self.num_scheduled <= len(self.tokens) + self.num_pending,
            "coverage": len(table) * span_tokens >= self.num_scheduled,
            "holding": is_running or not table.spans,
            "rows": is_running or self.num_scheduled == 0,
            "page ids": [view.tolist() for view in table.views] == expected,
            "registered": self.num_registered * span_tokens <= self.num_computed,
            "room": len(self.tokens) - self.num_prompt < self._num_output_at_limit,
        }
        wrong = [name for name, claim in claims.items() if not claim]
        if wrong:
            raise GnomonError(f"request {self.request_id!r} is inconsistent: {', '.join(wrong)}")
