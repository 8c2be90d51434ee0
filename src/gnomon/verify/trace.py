"""Trace: all that one request showed on its way through a model: tokens, logits, choices, margins.

In:  an EngineCore, requests, and when each of them arrives; perhaps choices, cached values and
     tokens to replay.
Out: a Trace per request. Row p of every tensor belongs to position p. The token sampled last has
     no row: it was never run. Rows that came out of the prefix cache were not computed.
Rows of the DENSE route, and rows that see at most K keys, have no list of their own in a recording;
here they hold the causal list, which is what they attend.
Not here: comparing traces (margins.py), traces of transformers (oracle.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnomon.attention.taps import Recording, RecordingTap, ReplayTap, SelectionTap
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import EngineRequest, OutputDelta
from gnomon.engine.runner import Taps
from gnomon.errors import GnomonError, NumericsError
from gnomon.verify.cached_values import CachedValues, NamingTap, Replayed
from gnomon.verify.captured import CapturedRunner
from gnomon.verify.engines import TracedCore
from gnomon.verify.forced_tokens import Tokens
from gnomon.verify.known_choices import KnownChoices
from gnomon.verify.logits_record import LogitsRecorder
from gnomon.verify.roughness import Roughness

Choices = Mapping[int, Tensor]  # by layer


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One request's run over n = len(tokens) − 1 rows."""

    name: str
    num_prompt: int
    tokens: tuple[int, ...]  # prompt and output
    logits: Tensor  # [n, V] float32
    is_computed: Tensor  # [n] bool
    keys: Choices = field(default_factory=dict)  # [n, W] positions ascending, then −1
    experts: Choices = field(default_factory=dict)  # [n, k] ascending
    key_margin: Choices = field(default_factory=dict)  # [n] float64, +inf where nothing was cut
    expert_margin: Choices = field(default_factory=dict)
    num_cached: int = 0
    num_dense_rows: int = 0  # computed rows that no indexer saw
    cached: CachedValues = field(default_factory=dict)  # empty where the cache does not round
    roughness: Roughness | None = None  # of the engine's arithmetic; None: float32 or finer

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens that the model chose."""
        return self.tokens[self.num_prompt :]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a run takes from another one: its choices, and what that wrote into its cache.

    With `tokens` (prompt and output) too, own choices are kept beside those that are replayed.
    """

    choices: Recording | None = None
    cache: Replayed = field(default_factory=dict)
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Staging:
    """When requests come (by name, in steps; absent: at once), and what they replay."""

    arrivals: Mapping[str, int] = field(default_factory=dict)
    replay: Replay = field(default_factory=Replay)


def drive(
    core: EngineCore, requests: Sequence[EngineRequest], staging: Staging | None = None
) -> dict[str, Trace]:
    """Run requests to their end, together, and tell what each showed.

    A core with captured steps shows tokens, and the logits that they were sampled from. Raises
    NumericsError if a request ends by a fault, GnomonError if pages or queues are left in disorder,
    or if a captured core is to replay something.
    """
    staging = staging or Staging()
    own = core if isinstance(core, TracedCore) else None
    if own is not None and own.captured is not None:
        return _drive_captured(core, own.captured, requests, staging)
    selection = _selection_tap(staging.replay)
    listener: SelectionTap = selection
    if own is not None:
        own.sampler.given = staging.replay.tokens or {}
        if own.tape is not None:
            own.tape.restart(staging.replay.cache)
            listener = NamingTap(selection, own.tape)
    logits = LogitsRecorder()
    core.taps = Taps(selection=listener, logits=logits)
    try:
        deltas = _run(core, requests, staging.arrivals)
    finally:
        core.taps = None
    core.check_integrity()
    recording = Recording() if isinstance(selection, ReplayTap) else selection.recording
    traces = [
        _trace(request, deltas[request.request_id], logits, recording) for request in requests
    ]
    if own is not None and own.tape is not None:
        traces = [replace(one, cached=own.tape.of(one.name, len(one.logits))) for one in traces]
    if own is not None and own.roughness is not None:
        traces = [replace(one, roughness=own.roughness) for one in traces]
    return {trace.name: trace for trace in traces}


def _selection_tap(replay: Replay) -> RecordingTap | KnownChoices | ReplayTap:
    if replay.tokens is not None:
        return KnownChoices(replay.choices or Recording())
    return RecordingTap() if replay.choices is None else ReplayTap(replay.choices)


def _drive_captured(
    core: EngineCore,
    captured: CapturedRunner,
    requests: Sequence[EngineRequest],
    staging: Staging,
) -> dict[str, Trace]:
    if staging.replay != Replay():
        raise GnomonError("captured steps take nothing from another run")
    captured.restart()
    deltas = _run(core, requests, staging.arrivals)
    core.check_integrity()
    return {
        one.request_id: _trace(one, deltas[one.request_id], captured.seen, Recording())
        for one in requests
    }


def _run(
    core: EngineCore, requests: Sequence[EngineRequest], arrivals: Mapping[str, int]
) -> dict[str, list[OutputDelta]]:
    deltas: dict[str, list[OutputDelta]] = {request.request_id: [] for request in requests}
    waiting = sorted(requests, key=lambda request: arrivals.get(request.request_id, 0))
    step = 0
    while waiting or core.has_work:
        while waiting and (arrivals.get(waiting[0].request_id, 0) <= step or not core.has_work):
            core.add([waiting.pop(0)])
        for delta in core.step():
            deltas[delta.request_id].append(delta)
            if delta.error is not None:
                raise NumericsError(f"request {delta.request_id!r} ended by a fault: {delta.error}")
        step += 1
    return deltas


def _trace(
    request: EngineRequest,
    deltas: Sequence[OutputDelta],
    logits: LogitsRecorder,
    recording: Recording,
) -> Trace:
    name, prompt = request.request_id, tuple(request.prompt_token_ids)
    tokens = prompt + tuple(token for delta in deltas for token in delta.token_ids)
    rows, is_computed = logits.of(name, len(tokens) - 1)
    num_rows = len(rows)
    keys = {layer: t for (layer, owner), t in recording.index.items() if owner == name}
    experts = {layer: t for (layer, owner), t in recording.experts.items() if owner == name}
    seen = next(iter(keys.values()), None)
    num_listed = 0 if seen is None else int((seen[:, 0] >= 0).sum())
    return Trace(
        name=name,
        num_prompt=len(prompt),
        tokens=tokens,
        logits=rows,
        is_computed=is_computed,
        keys={layer: with_causal_lists(_fit(t, num_rows, -1)) for layer, t in keys.items()},
        experts={layer: _fit(t, num_rows, -1).sort(-1).values for layer, t in experts.items()},
        key_margin=_margins(recording.index_margin, name, num_rows),
        expert_margin=_margins(recording.expert_margin, name, num_rows),
        num_cached=deltas[0].num_cached_tokens,
        num_dense_rows=int(is_computed.sum()) - num_listed if experts or keys else 0,
    )


def _margins(kept: Mapping[tuple[int, str], Tensor], name: str, num_rows: int) -> Choices:
    return {
        layer: _fit(margin[:, None], num_rows, torch.inf)[:, 0]
        for (layer, owner), margin in kept.items()
        if owner == name
    }


def _fit(values: Tensor, num_rows: int, empty: float) -> Tensor:
    """[rows, W] as [num_rows, W], filled up with `empty`."""
    if values.shape[0] == num_rows:
        return values
    fitted = values.new_full((num_rows, values.shape[1]), empty)
    fitted[: values.shape[0]] = values[:num_rows]
    return fitted


def with_causal_lists(ids: Tensor) -> Tensor:
    """Key lists [n, W] where an empty row p that could see at most W keys gets 0 .. p."""
    num_rows, width = ids.shape
    position = torch.arange(num_rows)[:, None]
    column = torch.arange(width)[None, :].to(ids.dtype)
    causal = torch.where(column <= position, column, -1)
    is_empty = (ids[:, :1] < 0) & (position < width)
    return torch.where(is_empty, causal, ids)


def recording_of(traces: Mapping[str, Trace]) -> Recording:
    """The choices of traces as a Recording to replay, under the names given here."""
    recording = Recording()
    layers = sorted({layer for trace in traces.values() for layer in trace.keys})
    for name, trace in traces.items():
        num_rows = len(trace.logits)
        for layer in layers:  # a trace without lists was attended densely throughout
            own = trace.keys.get(layer)
            everything = torch.full((num_rows, num_rows), -1, dtype=torch.int32)
            recording.index[layer, name] = with_causal_lists(everything) if own is None else own
        recording.experts.update({(layer, name): ids for layer, ids in trace.experts.items()})
    return recording


def cache_of(traces: Mapping[str, Trace]) -> Replayed:
    """What traces wrote into their caches, to replay; empty where the cache does not round."""
    return {name: trace.cached for name, trace in traces.items() if trace.cached}
