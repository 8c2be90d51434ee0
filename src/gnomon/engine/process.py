"""The engine process: an EngineCore behind two sockets. This is the side that runs the steps.

In:  commands from a PULL socket (wire.py), SIGTERM, and the pipe whose end tells that the parent
     process has gone.
Out: events to a PUSH socket: progress of the start, then one StepOutput per step.
The loop never sleeps and never polls on a clock: with work it takes waiting commands without
blocking and runs a step; without work it blocks until a command, a signal or the parent's end.
A daemon thread sends heartbeats, so that a hung process can be told from a long step; another
one ends the process at once when its parent dies, be it in the middle of a step.
Errors: an exception out of a step is fatal; it is sent with its traceback, exit code 1.
Not here: starting the process (launch.py), pending requests (client.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import zmq

from gnomon.engine import wire
from gnomon.engine.config import EngineConfig
from gnomon.engine.messages import EngineRequest, EngineStats, OutputDelta, ShadowStats
from gnomon.errors import EngineDeadError, GnomonError

HEARTBEAT_S = 1.0
PROGRESS_INTERVAL_S = 0.05
Progress = Callable[[str, int, int], None]  # (stage, done, total)


class Core(Protocol):
    """What the loop needs of an engine core (core.EngineCore is one)."""

    @property
    def info(self) -> wire.EngineInfo: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, requests: Sequence[EngineRequest]) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> list[OutputDelta]: ...

    def abort_all(self) -> list[OutputDelta]: ...

    def step(self) -> list[OutputDelta]: ...

    def stats(self) -> EngineStats: ...

    def shadow_stats(self) -> ShadowStats | None: ...

    def reset_prefix_cache(self) -> None: ...


class EngineLoop:
    """Commands in, steps, events out, until drained or failed."""

    def __init__(
        self,
        core: Core,
        commands: zmq.Socket[bytes],
        send: Callable[[wire.Event], None],
        signals: socket.socket,
    ) -> None:
        """`signals` becomes readable at a signal; `send` never blocks."""
        self._core = core
        self._commands = commands
        self._send = send
        self._signals = signals
        self._poller = zmq.Poller()
        self._poller.register(commands, zmq.POLLIN)
        self._poller.register(signals.fileno(), zmq.POLLIN)
        self._deadline: float | None = None  # of the drain, on the monotonic clock
        self.step_began: float | None = None  # read by the thread of the heartbeats
        self.has_term_signal = False  # set by the signal handler, which must not do more

    def run(self, drain_timeout_s: float) -> None:
        """Serve until a drain is complete. Exceptions of a step go through."""
        core = self._core
        while self._deadline is None or core.has_work:
            if not core.has_work:
                self._poller.poll()
            self._take_commands()
            if self.has_term_signal and self._deadline is None:
                self._drain(drain_timeout_s)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._report(core.abort_all())
            if core.has_work:
                self.step_began = time.monotonic()
                deltas = core.step()
                self.step_began = None
                self._report(deltas)

    def on_term_signal(self, *_: object) -> None:
        """The handler of SIGTERM."""
        self.has_term_signal = True

    def _drain(self, deadline_s: float) -> None:
        """No new requests; what runs may go on for `deadline_s` seconds."""
        self._deadline = time.monotonic() + deadline_s
        self._send(wire.Draining())

    def _report(self, deltas: list[OutputDelta]) -> None:
        self._send(wire.StepOutput(deltas, self._core.stats()))

    def _take_commands(self) -> None:
        """Obey every command that has arrived, without waiting."""
        with contextlib.suppress(BlockingIOError):
            self._signals.recv(4096)
        while True:
            try:
                data = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(wire.decode_command(data))

    def _obey(self, command: wire.Command) -> None:
        if isinstance(command, wire.AddRequests):
            self._add(command.requests)
        elif isinstance(command, wire.AbortRequests):
            self._report(self._core.abort(command.request_ids))
        elif isinstance(command, wire.Drain):
            self._drain(command.deadline_s)
        else:
            self._core.reset_prefix_cache()

    def _add(self, requests: Sequence[EngineRequest]) -> None:
        try:
            if self._deadline is not None:
                raise EngineDeadError("the engine is going down and takes no new requests")
            self._core.add(requests)
        except GnomonError as error:
            for request in requests:
                self._send(wire.refusal(request.request_id, error))


def engine_main(
    config: EngineConfig,
    endpoints: tuple[str, str],
    parent_pipe: int,
    build: Callable[[EngineConfig, Progress], Core],
) -> int:
    """Run an engine until it is drained; the exit code. `endpoints`: commands, events."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent drains
    folder = endpoints[0].removeprefix("ipc://").rpartition("/")[0]
    threading.Thread(target=_die_with_parent, args=(parent_pipe, folder), daemon=True).start()
    context = zmq.Context()
    commands = _socket(context, zmq.PULL, endpoints[0])
    events = _socket(context, zmq.PUSH, endpoints[1])
    heart = _socket(context, zmq.PUSH, endpoints[1])  # a socket belongs to one thread

    def send(event: wire.Event) -> None:
        events.send(wire.encode(event))

    try:
        report = _throttled(lambda *step: send(wire.LoadProgress(*step)))
        report("engine process", 1, 1)
        core = build(config, report)
        code = _serve(core, commands, send, config, heart)
    except GnomonError as error:
        send(wire.StartFailed(type(error).__name__, str(error)))
        code = 1
    events.close(linger=1000)  # the last events get a second to leave
    commands.close(linger=0)
    heart.close(linger=0)
    context.term()
    return code


def _serve(
    core: Core,
    commands: zmq.Socket[bytes],
    send: Callable[[wire.Event], None],
    config: EngineConfig,
    heart: zmq.Socket[bytes],
) -> int:
    """Announce the core as ready and run it to its end; the exit code."""
    gc.collect()
    gc.freeze()  # what is here stays: looking through it again would stop a step for 300 ms
    with _signal_socket() as signals:
        loop = EngineLoop(core, commands, send, signals)
        signal.signal(signal.SIGTERM, loop.on_term_signal)
        send(wire.EngineReady(core.info))
        with _heartbeats(heart, loop, core):
            try:
                loop.run(config.drain_timeout_s)
            except Exception as error:  # whatever it is, the engine's state is no longer known
                words = "; ".join([f"{type(error).__name__}: {error}", *_notes(error)])
                send(wire.EngineFailed(words, traceback.format_exc()))
                return 1
    send(wire.EngineStopped())
    return 0


def _notes(error: Exception) -> list[str]:
    """What was added to an error on its way, such as the step that it happened in."""
    return list(getattr(error, "__notes__", ()))


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """A connected socket without a high-water mark: what may pile up is bounded by the client."""
    made = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.connect(endpoint)
    return made


@contextlib.contextmanager
def _signal_socket() -> Iterator[socket.socket]:
    """A socket that becomes readable when a signal arrives, so that a blocked poll wakes up."""
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield receiver
    finally:
        signal.set_wakeup_fd(previous)
        receiver.close()
        sender.close()


def _die_with_parent(parent_pipe: int, folder: str) -> None:
    """Block until the parent's end of the pipe is closed, which only its death does; then exit."""
    select.select([parent_pipe], [], [])
    shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to remove the sockets
    os._exit(2)


@contextlib.contextmanager
def _heartbeats(heart: zmq.Socket[bytes], loop: EngineLoop, core: Core) -> Iterator[None]:
    """Send a heartbeat now and then from another thread, which alone uses the socket `heart`."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(HEARTBEAT_S):
            began = loop.step_began
            step_s = 0.0 if began is None else time.monotonic() - began
            heart.send(wire.encode(wire.Heartbeat(step_s, core.shadow_stats())))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _throttled(report: Progress) -> Progress:
    """The same reports, at most one per stage and interval, the last one of a stage always."""
    last: dict[str, float] = {}

    def reported(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - last.get(stage, 0.0) >= PROGRESS_INTERVAL_S:
            last[stage] = now
            report(stage, done, total)

    return reported
