"""Runners that show what captured steps compute, without a tap on them.

In:  a Runner with graphs, and steps as an engine gives them to it.
Out: `CapturedRunner.seen`: the logits that tokens were sampled from; `replays`: (live rows, bucket)
     of every replayed decode step; `num_prefills`: prefill and mixed steps that went by graphs. A
     `TwinRunner` runs each of them a second time, eagerly, operator by operator, over the same
     tokens and the same cache (running a step twice leaves the cache the same), and keeps both
     logits: what differs then was made in this one step.
`ReplayRecorder` replays a step's work without CUDA, so that plans, buffers and padded buckets are
put to the test on a CPU too; addresses and kernels are not.
Not here: what may differ (laws/captured.py), capturing (engine/graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gnomon.attention.ops.operators import Operators
from gnomon.attention.taps import RecordingTap
from gnomon.engine.batch import Batch, DecodeBatch
from gnomon.engine.graphs import Outputs, Work
from gnomon.engine.runner import Runner, RunOutput, Taps
from gnomon.verify.logits_record import LogitsRecorder


class ReplayRecorder:
    """A Recorder: a replay does the recorded work again, into the same outputs."""

    def record(self, work: Work) -> tuple[Callable[[], None], Outputs]:
        """(replay, outputs)."""
        outputs = work()

        def replay() -> None:
            for kept, new in zip(outputs, work(), strict=True):
                if kept is not new:
                    kept.copy_(new)

        return replay, outputs


@dataclass(frozen=True, slots=True, eq=False)
class TwinStep:
    """One step both ways: rows of (name, position), logits [B, V] float32 on the host."""

    rows: tuple[tuple[str, int], ...]
    captured: Tensor
    eager: Tensor
    taps: RecordingTap


class CapturedRunner(Runner):
    """The runner that it is made of, listened to from outside."""

    def __init__(self, inner: Runner) -> None:
        vars(self).update(vars(inner))
        self.restart()

    def restart(self) -> None:
        """Forget what was seen."""
        self.seen = LogitsRecorder()
        self.replays: list[tuple[int, int]] = []
        self.num_prefills = 0
        self.twins: list[TwinStep] = []

    def run(
        self,
        batch: Batch | DecodeBatch,
        taps: Taps | None = None,
        ops: Operators | None = None,
        is_checked: bool = True,
    ) -> RunOutput:
        """As the inner one runs; what is sampled from is kept."""
        output = super().run(batch, taps, ops, is_checked)
        names = [row.request.request_id for row in batch.samples]
        self.seen.logits(names, [row.position - 1 for row in batch.samples], output.logits)
        if isinstance(batch, DecodeBatch):
            self.replays.append((len(names), batch.bucket))
        elif self.captures(batch):
            self.num_prefills += 1
        return output


class TwinRunner(CapturedRunner):
    """Runs captured steps twice (module docstring); `plain`: the operators of the second run."""

    def __init__(self, inner: Runner, plain: Operators) -> None:
        super().__init__(inner)
        self._plain = plain

    def run(
        self,
        batch: Batch | DecodeBatch,
        taps: Taps | None = None,
        ops: Operators | None = None,
        is_checked: bool = True,
    ) -> RunOutput:
        """The captured step's output; the eager one's is kept beside it."""
        output = super().run(batch, taps, ops, is_checked)
        if batch.samples and (isinstance(batch, DecodeBatch) or self.captures(batch)):
            captured = output.logits.float().cpu().clone()  # the next replay writes there
            tap = RecordingTap()
            eager = Runner.run(self, batch, Taps(selection=tap), self._plain)
            rows = tuple((row.request.request_id, row.position - 1) for row in batch.samples)
            self.twins.append(TwinStep(rows, captured, eager.logits.float().cpu(), tap))
        return output
