"""What travels between the API process and the engine process: msgspec structs in msgpack.

In and out: `Command`s go to the engine, `Event`s come from it; `encode`, `decode_command`,
`decode_event` are the only places that know the bytes. One event carries all deltas of a step.
Not here: sockets and processes (process.py, launch.py, client.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from gnomon.engine.messages import EngineRequest, EngineStats, OutputDelta, ShadowStats
from gnomon.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    GnomonError,
    LayoutError,
    OverloadError,
    RequestError,
    UnsupportedError,
)


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Queue these; they come together, as the choices of one client request do."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """End these without another token; unknown ids are ignored."""

    request_ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new requests, finish the running ones within the deadline, then stop."""

    deadline_s: float


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached page that no request holds."""


Command = AddRequests | AbortRequests | Drain | ResetPrefixCache


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Start-up goes on: `done` of `total` of what `stage` names."""

    stage: str
    done: int
    total: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front of the house has to know about a ready engine.

    resolved: every field of the configuration with its value, its source ("default", "flag",
    "model", "machine") and the reason. operators: operator, provider, why, what was rejected.
    """

    model_label: str
    model_type: str
    revision: str
    folder: str | None
    tokenizer: str | None
    vocab_size: int
    max_model_len: int
    max_in_flight: int
    drain_timeout_s: float
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]
    resolved: dict[str, tuple[Any, str, str]]
    operators: list[tuple[str, str, str, str]]
    cache: dict[str, int | str]


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests from now on."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start; `kind` is the class of the error."""

    kind: str
    message: str


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """All that one step (or an abort) brought, and the counters after it."""

    deltas: list[OutputDelta]
    stats: EngineStats


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """A request that never ran: what the engine raised for it."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The engine lives; its current step has run for `step_s` seconds (0: between steps).

    shadow: what shadow mode found meanwhile, also while no step runs; None without it.
    """

    step_s: float
    shadow: ShadowStats | None = None


class Draining(msgspec.Struct, frozen=True, tag=True):
    """The engine takes no new requests any more."""


class EngineStopped(msgspec.Struct, frozen=True, tag=True):
    """The engine has drained and exits in good order."""


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """A step raised: the engine exits. `trace` is the traceback's text."""

    message: str
    trace: str


Event = (
    LoadProgress
    | EngineReady
    | StartFailed
    | StepOutput
    | RequestRefused
    | Heartbeat
    | Draining
    | EngineStopped
    | EngineFailed
)

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """The bytes of one message."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """The command that `encode` made bytes of."""
    return _command_decoder.decode(data)


def decode_event(data: bytes) -> Event:
    """The event that `encode` made bytes of."""
    return _event_decoder.decode(data)


def refusal(request_id: str, error: GnomonError) -> RequestRefused:
    """The event that carries an error about one request over the wire."""
    return RequestRefused(
        request_id=request_id,
        kind=type(error).__name__,
        message=str(error),
        param=getattr(error, "param", None),
        code=getattr(error, "code", None),
        retry_after_s=getattr(error, "retry_after_s", 1.0),
    )


def refused_error(event: RequestRefused) -> GnomonError:
    """The error that `refusal` was made from."""
    if event.kind == "OverloadError":
        return OverloadError(event.message, event.retry_after_s)
    if event.kind == "RequestError":
        return RequestError(event.message, param=event.param, code=event.code)
    return named_error(event.kind, event.message)


def named_error(kind: str, message: str) -> GnomonError:
    """An error of the class called `kind`; a class unknown here becomes EngineDeadError."""
    for known in (CheckpointError, ConfigError, LayoutError, UnsupportedError, EngineDeadError):
        if known.__name__ == kind:
            return known(message)
    return EngineDeadError(f"{kind}: {message}")
