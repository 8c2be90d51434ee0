"""Run tests again and again without paying for imports: fork a process that has torch already.

In:  a folder that holds src/ and tests/, pytest arguments, a limit in CPU seconds.
Out: `Outcome`: whether a test failed, which one, and the CPU and wall seconds that it took.
How: this process imports what tests need of other people's packages, but nothing of gnomon. A fork
     puts the folder's own src first on the path, runs pytest with -x and writes what happens into a
     pipe. The kernel ends a fork that passes its CPU limit (a mutant may loop for ever); wall time
     says little on a busy machine, so it has a far wider limit, which settles nothing.
Not here: what is mutated, and where (trial.py).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

WALL_PER_CPU = 8  # a busy machine may be so many times slower
PRELOADED = (
    "numpy", "torch", "hypothesis", "hypothesis.strategies", "hypothesis.extra.numpy", "msgspec",
    "anyio", "safetensors.torch", "tokenizers", "jinja2", "pydantic", "prometheus_client", "zmq",
    "pytest", "_pytest.assertion.rewrite", "_pytest.python", "_hypothesis_pytestplugin",
    "anyio.pytest_plugin", "pytest_timeout",
)  # fmt: skip
PLUGINS = ("_hypothesis_pytestplugin", "anyio.pytest_plugin", "pytest_timeout")
ARGUMENTS = ("-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "--timeout=0")


class Ending(StrEnum):
    """How the tests of one fork came out."""

    PASSED = "passed"
    FAILED = "failed"
    LOOPED = "looped"  # passed its CPU limit
    UNSETTLED = "unsettled"  # passed its wall limit, or died otherwise


@dataclass(frozen=True, slots=True)
class Outcome:
    """``test``: the one that failed, or that ran when the fork was ended; "" if all passed."""

    ending: Ending
    test: str
    cpu_s: float
    wall_s: float


class _Watcher:
    """A pytest plugin that writes a line per event: "> test" at a start, "! test" at a failure.

    It also keeps Hypothesis from shrinking what it found: one failing example is enough.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def say(self, line: str) -> None:
        os.write(self._pipe, (line + "\n").encode())

    def pytest_collection(self) -> None:  # conftest.py has loaded its profile by now
        now = settings.get_profile(settings.get_current_profile_name())
        settings.register_profile("mutation", now, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutation")

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self.say(f"> {nodeid}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.say(f"! {report.nodeid}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.say(f"! {report.nodeid} (import)")


def preload() -> None:
    """Import other people's packages once, in the process that is forked later."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1")
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_tests(
    tree: Path, tests: Sequence[str], cpu_limit_s: float, *, writes_bytecode: bool = False
) -> Outcome:
    """Fork, run ``tests`` of ``tree`` up to the first failure, wait."""
    begun = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_the_child(tree, tests, cpu_limit_s, writer, writes_bytecode)
    os.close(writer)
    try:
        status, usage = _wait(child, begun + WALL_PER_CPU * cpu_limit_s)
    except BaseException:
        os.kill(child, signal.SIGKILL)  # whoever interrupts the run leaves no fork behind
        raise
    with os.fdopen(reader, encoding="utf-8", errors="replace") as pipe:
        lines = pipe.read().splitlines()
    seconds = (usage.ru_utime + usage.ru_stime, time.monotonic() - begun)
    failed = [line[2:] for line in lines if line.startswith("!")]
    if failed:
        return Outcome(Ending.FAILED, failed[0], *seconds)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return Outcome(Ending.PASSED, "", *seconds)
    last = next((line[2:] for line in reversed(lines) if line.startswith(">")), "(collection)")
    has_looped = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    return Outcome(Ending.LOOPED if has_looped else Ending.UNSETTLED, last, *seconds)


def _wait(child: int, deadline: float) -> tuple[int, resource.struct_rusage]:
    """The status and usage of the child, which is ended at the deadline."""
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return status, usage
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return status, usage
        time.sleep(0.02)


def _be_the_child(
    tree: Path, tests: Sequence[str], cpu_limit_s: float, pipe: int, writes_bytecode: bool
) -> None:
    """Run pytest in this process and end it; never returns."""
    code = 3
    try:
        limit = max(1, round(cpu_limit_s))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        sys.dont_write_bytecode = not writes_bytecode
        os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", HF_HUB_OFFLINE="1")
        os.chdir(tree)
        sys.path[:0] = [str(tree / "src"), str(tree)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tools", "gnomon")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        import gnomon

        if not str(gnomon.__file__).startswith(str(tree)):
            raise RuntimeError(f"gnomon was imported from {gnomon.__file__}, not from {tree}")
        plugins = [argument for name in PLUGINS for argument in ("-p", name)]
        code = int(pytest.main([*ARGUMENTS, *plugins, *tests], plugins=[_Watcher(pipe)]))
    except BaseException as error:
        os.write(pipe, f"! (import) {type(error).__name__}: {str(error)[:200]!r}\n".encode())
    finally:
        os._exit(code)
