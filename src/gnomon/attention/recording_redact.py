"""Redaction: a recording without the tensors from which a token could be looked up.

In:  a Recording. Out: another one, or the same if it was redacted before.
Gone are: token ids, names of requests, texts of errors; everything of layer 0, whose queries, keys
and latents are functions of one token's id; every call over the hidden state (norms of that width,
experts), in which the token's embedding is a summand; and what belongs to no layer.
What stays can be replayed: attention, indexer and cache operators of the later layers, geometry
and plan. It was computed from the prompt all the same: who has the weights and takes the trouble
can learn about the text from it. It is less to lose, not nothing.
Not here: who may read the file (recording_file.py).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gnomon.attention.recording import RecordedCall, Recording

WHY = "redacted"
OVER_HIDDEN_STATE = frozenset({"rms_norm", "layer_norm", "moe"})


def redacted(recording: Recording) -> Recording:
    """The recording without what module docstring names; it says of itself that it is redacted."""
    if recording.is_redacted:
        return recording
    calls = tuple(_redacted_call(call, recording.hidden_size) for call in recording.calls)
    step = recording.step
    if step is not None:
        step = replace(step, request_ids=None, token_ids=None)
    return replace(
        recording, calls=calls, step=step, error=_kind(recording.error), is_redacted=True
    )


def _redacted_call(call: RecordedCall, hidden_size: int) -> RecordedCall:
    bare = replace(call, error=_kind(call.error))
    is_early = call.layer is None or call.layer == 0
    if is_early or (call.op in OVER_HIDDEN_STATE and _width(call) in (hidden_size, None)):
        return bare.without_data(WHY)
    return replace(bare, withheld=WHY if call.withheld else "")


def _width(call: RecordedCall) -> int | None:
    first = call.arguments[0] if call.arguments else None
    return int(first.shape[-1]) if isinstance(first, Tensor) else None


def _kind(error: str) -> str:
    """The class of an error without its text, which may quote the prompt."""
    return error.partition(":")[0]
