"""What a request must fulfil to be let in; asked once, when it is added.

In:  a new request's state, what is alive, the limits. Out: nothing, or RequestError naming the
field. Not here: whether the queue has room (engine/scheduler.py), ids against the vocabulary
(EngineRequest.validate).
"""

from __future__ import annotations

from collections.abc import Container

from gnomon.cache.pages import PagePool
from gnomon.engine.messages import check_context
from gnomon.engine.request import RequestState
from gnomon.engine.schedule_config import SchedulerConfig
from gnomon.errors import RequestError


def check_request(
    state: RequestState, alive: Container[str], config: SchedulerConfig, pages: PagePool
) -> None:
    """Refuse what could never run, or not as asked."""
    request = state.request
    if request.request_id in alive:
        raise RequestError(
            f"request_id {request.request_id!r} is in use by a request that has not ended; "
            "choose another",
            param="request_id",
        )
    if not request.prompt_token_ids:
        raise RequestError(
            "the prompt is empty; it must hold at least one token",
            param="prompt",
            code="empty_prompt",
        )
    check_context(state.num_prompt, config.max_model_len)
    needed = pages.num_spans_for(state.max_cached_tokens)
    if needed > pages.num_spans:
        raise RequestError(
            f"the request may grow to {state.max_cached_tokens} cached tokens, {needed} pages of "
            f"{pages.span_tokens} tokens, but the cache has {pages.num_spans}; lower max_tokens, "
            "shorten the prompt, or start the server with a larger cache",
            param="max_tokens",
            code="cache_too_small",
        )


def check_fork(state: RequestState, parent: RequestState) -> None:
    """Refuse a fork whose prompt is not its parent's, for it takes over what that has cached."""
    request, other = state.request, parent.request
    is_copy = request.prompt_token_ids == other.prompt_token_ids
    if not is_copy or request.cache_salt != other.cache_salt:
        raise RequestError(
            f"request {request.request_id!r} is to be a fork of {other.request_id!r}, but has "
            "another prompt or cache_salt; a fork has the same",
            param="fork_of",
        )
