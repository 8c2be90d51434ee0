"""Shadow mode: some steps are computed once more by the reference, off the critical path.

In:  recordings of few rows, of the share of steps that is asked for (by step id, the same ones in
     every run).
Out: ShadowStats: the worst difference per operator, and how much was looked at, dropped or late.
The reference runs in a process of its own, at the lowest priority, one step after the other, for at
most BUDGET_S a step. Two steps may wait; while they do, further ones are dropped and counted, and
not even copied. The engine never waits for it, and nothing that it says changes an answer.
Recordings stay in memory, here and there, and are gone after the comparison.
Not here: the process (shadow_worker.py), the copy (attention/recording_capture.py).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from gnomon.attention.recording import Recording
from gnomon.attention.recording_capture import Limits
from gnomon.attention.recording_file import to_bytes
from gnomon.engine.messages import ShadowOperator, ShadowStats

logger = logging.getLogger(__name__)

NUM_ROWS = 64
SHADOW_LIMITS = Limits(num_rows=NUM_ROWS, call_bytes=32 << 20, total_bytes=256 << 20)
BUDGET_S = 10.0
HANG_S = 6 * BUDGET_S  # one call may take longer than the budget; beyond this it hangs
MAX_WAITING = 2
MAX_STARTS = 3
CHILD = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from gnomon.engine.shadow_worker import main; main(start['budget_s'])"
)
OnDifference = Callable[[Recording], object]


def is_chosen(step_id: int, share: float) -> bool:
    """Whether a step belongs to the share: a fixed hash of its id, in 0..1, is below it."""
    mask = (1 << 64) - 1
    mixed = (step_id + 1) * 0x9E3779B97F4A7C15 & mask  # splitmix64's finaliser
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return (mixed ^ mixed >> 31) / 2.0**64 < share


class Shadow:
    """Takes recordings and compares them elsewhere (module docstring)."""

    def __init__(
        self,
        share: float,
        on_difference: OnDifference | None = None,
        budget_s: float = BUDGET_S,
    ) -> None:
        """``on_difference`` is called, in another thread, with a recording that differs."""
        self._share = share
        self._on_difference = on_difference
        self._budget_s = budget_s
        self._queue: queue.Queue[Recording | None] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0  # written by the engine's thread alone; all else by the other
        self._found = ShadowStats()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._compare_all, name="shadow", daemon=True)
        self._thread.start()

    def wants(self, step_id: int) -> bool:
        """Whether to copy this step. One that finds the queue full is counted as dropped."""
        if not is_chosen(step_id, self._share):
            return False
        if self._queue.full() or self._is_closed:
            self._num_dropped += 1
            return False
        return True

    def offer(self, recording: Recording) -> None:
        """Hand over a copy; dropped, and counted, if the queue is full. Never blocks."""
        try:
            self._queue.put_nowait(recording)
        except queue.Full:
            self._num_dropped += 1

    def stats(self) -> ShadowStats:
        """What was found so far."""
        found = self._found
        return ShadowStats(
            steps=found.steps,
            dropped=self._num_dropped,
            errors=found.errors,
            late_calls=found.late_calls,
            operators=found.operators,
        )

    def wait(self) -> None:
        """Block until everything that was handed over is compared. For tests and tools."""
        self._queue.join()

    def close(self) -> None:
        """End the process; what waits is lost. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        while self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:
                self._thread.join(0.05)
        self._thread.join()
        self._end_process()

    def _compare_all(self) -> None:
        while True:
            recording = self._queue.get()
            try:
                if recording is None:
                    return
                if not self._is_closed:
                    self._compare(recording)
            except Exception as error:  # the shadow may fail, the engine goes on
                if not self._is_closed:
                    logger.warning("shadow: a step was not compared: %s", error)
                self._end_process()
                self._count(errors=1)
            finally:
                self._queue.task_done()

    def _compare(self, recording: Recording) -> None:
        answer = self._ask(to_bytes(recording))
        operators = dict(self._found.operators)
        num_differing = 0
        for name, (cases, differing, worst, share) in answer["operators"].items():
            old = operators.get(name, ShadowOperator())
            operators[name] = ShadowOperator(
                cases=old.cases + cases,
                differing=old.differing + differing,
                worst_difference=max(old.worst_difference, worst),
                worst_share=max(old.worst_share, share),
            )
            num_differing += differing
        self._count(steps=1, late_calls=answer["late"], operators=operators)
        if num_differing:
            logger.warning("shadow: %s", answer["first"])
            if self._on_difference is not None:
                self._on_difference(recording)

    def _count(
        self,
        steps: int = 0,
        errors: int = 0,
        late_calls: int = 0,
        operators: dict[str, ShadowOperator] | None = None,
    ) -> None:
        old = self._found
        self._found = ShadowStats(
            steps=old.steps + steps,
            errors=old.errors + errors,
            late_calls=old.late_calls + late_calls,
            operators=old.operators if operators is None else operators,
        )

    def _ask(self, data: bytes) -> dict[str, Any]:
        """Send one recording to the process, and wait for its answer."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(data).to_bytes(8, "little"))
        process.stdin.write(data)
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], HANG_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError("its process " + ("ended" if ready else "does not answer"))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._num_starts == MAX_STARTS:
            raise RuntimeError(f"its process was started {MAX_STARTS} times and is given up")
        self._num_starts += 1
        start = json.dumps({"path": sys.path, "budget_s": self._budget_s})
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self._process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unsent bytes to a process that has gone
                    logger.debug("shadow: its pipe was broken")
        process.wait()
