"""Start an engine process and hold its ends: sockets, pipe, exit. This is the parent's side.

In:  an EngineConfig and a callback for progress.
Out: an EngineProcess whose engine is ready, or the error that the engine met on its start
     (ConfigError, CheckpointError ...), or EngineDeadError if it died without a word.
A fresh interpreter is started rather than a fork (a parent with threads or CUDA must not fork)
or multiprocessing's spawn (which runs the user's main module again, so that a plain script would
start itself without end). Sockets live in a private folder (mode 0700) with a short path, because
ipc paths end at 107 characters. The engine holds the writing end of a pipe: its death, of any kind,
makes `death_fd` readable at once. It holds the reading end of another, which tells it of ours. It
logs to stderr, at the level of this process.
Not here: requests (client.py), the child's loop (process.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import zmq

from gnomon.engine import wire
from gnomon.engine.config import EngineConfig
from gnomon.errors import EngineDeadError

CHILD = """
import gc, json, logging, sys
gc.disable()  # what is imported stays: to look through it again and again takes 0.3 s
start = json.loads(sys.argv[1])
sys.path[:] = start["path"]
logging.basicConfig(level=start["log_level"], format=start["log_format"])
from functools import partial
from importlib import import_module
from gnomon.engine.config import EngineConfig
from gnomon.engine.process import engine_main
module, name = start["build"].split(":")
build = getattr(import_module(module), name)
config = EngineConfig(**start["config"])
build = partial(build, default_vocab_size=start["default_vocab_size"])
gc.freeze()
gc.enable()
sys.exit(engine_main(config, tuple(start["endpoints"]), start["parent_pipe"], build))
"""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
DEFAULT_BUILD = "gnomon.engine.core:build_core"
KILL_GRACE_S = 5.0


class EngineProcess:
    """A running engine process. Blocking; the asyncio side is client.ProcessClient."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, int, int], None] | None = None,
        *,
        build: str = DEFAULT_BUILD,
        default_vocab_size: int | None = None,
    ) -> None:
        """Start and wait until it is ready. `build`: "module:function" that makes the core.

        `default_vocab_size`: of a random model that names none (the tokenizer's).
        """
        self._folder = Path(tempfile.mkdtemp(prefix="gnomon-"))  # mkdtemp makes it 0700
        self._context = zmq.Context()
        self._is_closed = False
        try:
            self.commands = self._bound(zmq.PUSH, "c")
            self.events = self._bound(zmq.PULL, "e")
            self._spawn(config, build, default_vocab_size)
            self.info = self._wait_until_ready(progress or (lambda *_: None))
        except BaseException:  # KeyboardInterrupt too: never leave a process behind
            self.close()
            raise

    def _bound(self, kind: int, name: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, 0)  # the client bounds what is in flight
        made.setsockopt(zmq.RCVHWM, 0)
        made.setsockopt(zmq.LINGER, 0)
        made.bind(self._endpoint(name))
        return made

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

    def _spawn(self, config: EngineConfig, build: str, vocab_size: int | None) -> None:
        self.death_fd, death_writer = os.pipe()
        parent_reader, self._parent_writer = os.pipe()
        start = {
            "path": sys.path,
            "build": build,
            "config": asdict(config),
            "default_vocab_size": vocab_size,
            "endpoints": [self._endpoint("c"), self._endpoint("e")],
            "parent_pipe": parent_reader,
            "log_level": logging.getLogger("gnomon").getEffectiveLevel(),
            "log_format": LOG_FORMAT,
        }
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD, json.dumps(start)],
                pass_fds=(death_writer, parent_reader),
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(death_writer)
            os.close(parent_reader)

    def _wait_until_ready(self, progress: Callable[[str, int, int], None]) -> wire.EngineInfo:
        poller = zmq.Poller()
        poller.register(self.events, zmq.POLLIN)
        poller.register(self.death_fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self.events not in ready:
                raise EngineDeadError(self.obituary("while it was starting"))
            event = wire.decode_event(self.events.recv())
            if isinstance(event, wire.LoadProgress):
                progress(event.stage, event.done, event.total)
            elif isinstance(event, wire.StartFailed):
                raise wire.named_error(event.kind, event.message)
            elif isinstance(event, wire.EngineReady):
                self._wait_for_commands()
                return event.info

    def _wait_for_commands(self) -> None:
        """Until commands can be sent: the two sockets connect on their own, in either order."""
        poller = zmq.Poller()
        poller.register(self.commands, zmq.POLLOUT)
        poller.register(self.death_fd, zmq.POLLIN)
        if self.commands not in dict(poller.poll()):
            raise EngineDeadError(self.obituary("while it was starting"))

    def obituary(self, when: str) -> str:
        """How the process ended, for people. It has ended, or is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_GRACE_S)
        code = self.process.returncode
        if code is None:
            cause = "closed its pipe but did not exit"
        elif code < 0:
            cause = f"was killed by signal {-code}"
        else:
            cause = f"exited with code {code}"
        return f"the engine process (pid {self.process.pid}) {cause} {when}; see its log above"

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process without asking it."""
        if self.is_alive:
            self.process.kill()

    def close(self) -> None:
        """End the process if it runs; give back sockets, pipes and the folder. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if hasattr(self, "process"):
            self.kill()
            self.process.wait()
            os.close(self.death_fd)
            os.close(self._parent_writer)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
