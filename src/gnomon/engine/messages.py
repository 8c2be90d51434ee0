"""What goes into the engine and what comes out: plain values, sent by msgspec between processes.

In:  EngineRequest, one sequence to continue, as token ids.
Out: OutputDelta, what a step added to one request, and `joined`, what several did; EngineStats,
     counters for the metrics page.
All are frozen msgspec Structs; lists inside them are not to be changed by a receiver. They hold
plain data, so that no cycle is possible and the garbage collector need not look at them (gc=False):
with thousands of requests waiting its full runs would be what one notices.
Errors: `EngineRequest.validate` raises RequestError that names the field at fault.
Not here: text (frontend), the envelope around these on the wire (engine/process.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sequence to continue. A request with n > 1 is n of these that differ in `choice`.

    request_id        unique among the requests that are alive
    prompt_token_ids  at least one id
    choice            0-based; part of the key of the sampling noise, as are seed and position
    fork_of           request_id of the one with the same prompt whose cache this one takes over;
                      it waits until that prompt is computed, and computes alone if it has gone
    priority          lower runs first (policy "priority" only; vLLM's sign)
    cache_salt        requests of different salts share no cached pages
    arrival_s         seconds on any one clock; breaks ties of priority
    eos_token_ids     ids that end the sequence unless params.ignore_eos
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    choice: int = 0
    fork_of: str | None = None
    priority: int = 0
    cache_salt: str = ""
    arrival_s: float = 0.0
    eos_token_ids: tuple[int, ...] = ()

    def validate(self, vocab_size: int, max_model_len: int) -> None:
        """Refuse an empty or too long prompt and any id outside of [0, vocab_size)."""
        self.params.validate(vocab_size)
        ids = self.prompt_token_ids
        if not ids:
            raise RequestError(
                "the prompt is empty; it must hold at least one token",
                param="prompt",
                code="empty_prompt",
            )
        check_context(len(ids), max_model_len)
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"the prompt holds token id {token_id}; this model has ids 0 to "
                    f"{vocab_size - 1}",
                    param="prompt",
                )


def check_context(num_prompt_tokens: int, max_model_len: int) -> None:
    """Refuse a prompt that leaves no room for one new token, naming both numbers."""
    if num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, but the context of this server holds "
            f"{max_model_len}, one of them new; shorten the prompt to {max_model_len - 1} tokens "
            "or start the server with a larger --max-model-len",
            param="prompt",
            code="context_length_exceeded",
        )


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of one token (natural log), its rank (1 = best), and the best ones."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step added to one request.

    token_ids          new tokens, the one that ended it included
    logprobs           one per new token if asked for
    finish_reason      None while it runs; after it no further delta comes
    stop_reason        the stop token id (or, set by the frontend, string) that ended it; None for
                       EOS and for every other reason
    num_cached_tokens  prompt tokens that its first start found in the cache; the same in each delta
    error              why, if finish_reason is "error"
    prompt_logprobs    only in the first delta: one per prompt token, None for the first token
    queue_s            only in the first delta with a token: seconds from the request's arrival to
                       the start of its first step; 0 if it named no arrival
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    queue_s: float = 0.0


def joined(deltas: Sequence[OutputDelta]) -> Sequence[OutputDelta]:
    """The same output with one delta per request, in the order of their first ones.

    What several steps added to a request reads as if one step had. A fault stays by itself, so
    that what came before it can still be given out.
    """
    if len(deltas) < 2:
        return deltas
    parts: dict[str, list[OutputDelta]] = {}
    faults = []
    for delta in deltas:
        if delta.finish_reason == "error":
            faults.append(delta)
        else:
            parts.setdefault(delta.request_id, []).append(delta)
    return [*(of[0] if len(of) == 1 else _one_of(of) for of in parts.values()), *faults]


def _one_of(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """What came to one request as one delta."""
    first, last = deltas[0], deltas[-1]
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [score for delta in deltas for score in delta.logprobs or ()]
    prompts = (delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)
    return OutputDelta(
        request_id=first.request_id,
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_cached_tokens=last.num_cached_tokens,
        num_prompt_tokens=last.num_prompt_tokens,
        error=last.error,
        prompt_logprobs=next(prompts, None),
        queue_s=sum(delta.queue_s for delta in deltas),
    )


class ShadowOperator(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One operator in shadow mode: calls compared, those that differed, and the worst of them.

    worst_share: the largest difference as a share of what the operator's tolerance allows.
    """

    cases: int = 0
    differing: int = 0
    worst_difference: float = 0.0
    worst_share: float = 0.0


class ShadowStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What shadow mode has done since the start.

    steps: compared. dropped: chosen, but the shadow was behind. errors: could not be compared.
    late_calls: calls of compared steps for which the time did not suffice.
    """

    steps: int = 0
    dropped: int = 0
    errors: int = 0
    late_calls: int = 0
    operators: dict[str, ShadowOperator] = {}


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The scheduler's state after a step: gauges first, then counters since the start.

    kv_usage is the share of the cache that requests hold, 0 to 1. Prefix queries and hits count
    tokens, at the first start of a request only.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    step_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = {}
    rejected: int = 0
    checks: int = 0
    check_violations: int = 0
    shadow: ShadowStats | None = None
