"""StepSchedule: which rows of which requests one step computes. The scheduler's answer.

In:  made by Scheduler.schedule() alone.
Out: read by the batch builder and the runner, which decide nothing about scheduling again.
Cheap by design: nothing in it is as long as a request's history but for references. `tokens` and
the page arrays are owned by the request and only ever grow, so that the parts named here stay as
they are while the step is in flight, even if the request is preempted or aborted meanwhile.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from gnomon.engine.messages import EngineRequest

PageIds: TypeAlias = npt.NDArray[np.int32]


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """The rows of one request in a step: positions num_computed .. num_computed + num_new_tokens.

    token_ids     [num_new_tokens] ids of these rows
    pages         per group, in the order of StepSchedule.groups: int32 page ids, read-only use;
                  enough for kv_len tokens, maybe more
    needs_sample  the last row's logits give the request's next token, at position kv_len
    tokens        the request's whole sequence (prompt and output), growing: read tokens[:kv_len]
    is_ahead      its one token is what the step before samples, which the host has not seen yet;
                  token_ids holds a 0 in its place
    """

    request: EngineRequest
    num_computed: int
    num_new_tokens: int
    token_ids: list[int]
    pages: tuple[PageIds, ...]
    needs_sample: bool
    tokens: list[int]
    num_preemptions: int = 0
    is_ahead: bool = False

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def kv_len(self) -> int:
        """Tokens in the cache once this step has run; also the position of the next token."""
        return self.num_computed + self.num_new_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; tokens[num_prompt_tokens:kv_len] are the outputs so far."""
        return len(self.request.prompt_token_ids)


class StepSchedule(msgspec.Struct, frozen=True, gc=False):
    """One step. Each step that is not empty must be committed (or failed), in the order of its id.

    released: ids of requests that ended, for whatever reason, since the schedule before this one;
    a runner drops what it keeps per request.
    """

    step_id: int
    items: tuple[ScheduledRequest, ...]
    groups: tuple[str, ...]
    num_tokens: int
    released: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: then the step needs no commit."""
        return not self.items
