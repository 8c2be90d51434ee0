"""Kernels of a step compiled side by side, before the step runs for the first time.

In:  a device; work that launches kernels, in the shapes that will be met.
Out: nothing but compiled kernels. The work is run dry: Triton's launches compile in threads (its
     compiler works outside Python's lock), launchers and all; what others compile is
     noted (attention/dry_run.py) and built by processes meanwhile, into the library's own cache.
     One by one, as a first run meets them, a kernel of Triton takes half a second, one that nvcc
     compiles five, and a start has dozens.
A kernel that cannot be compiled fails here with a line in the log, and again where it is needed.
Not here: the work (graphs.py, prefill_graphs.py, warm_up.py), caches on the disk.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gnomon.attention.dry_run import DryRun, Note

logger = logging.getLogger(__name__)

MOST_THREADS = 16
MOST_PROCESSES = 8
PATIENCE_S = 120.0
Builder = subprocess.Popen[str]


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[DryRun]:
    """Work within is run dry (module docstring); on leaving, Triton's kernels are compiled.

    Elsewhere than on a GPU it changes nothing.
    """
    dry = DryRun()
    if device.type != "cuda":
        yield dry
        return
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch, build = JITFunction.run, JITFunction._do_compile

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    def remembered(
        self: Any, key: Any, signature: Any, device: Any, *rest: Any, **more: Any
    ) -> Any:
        found = build(self, key, signature, device, *rest, **more)
        if found is not None:  # the next launch of this kind finds what is being compiled
            self.device_caches[device][0].setdefault(key, found)
        return found

    threads = max(1, min(MOST_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, "compile") as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)
        with mode:
            JITFunction.run, JITFunction._do_compile = compile_only, remembered
            try:
                with dry:
                    yield dry
            finally:
                JITFunction.run, JITFunction._do_compile = launch, build
        kernels = [future.kernel for future in mode.future_kernels.values() if future.kernel]
        if kernels:
            here = torch.cuda.current_device()
            list(pool.map(lambda kernel: _load(kernel, here), kernels))


def _load(kernel: Any, device: int) -> None:
    """What a kernel's first launch would do: compile its launcher, and put it onto the device."""
    torch.cuda.set_device(device)
    with suppress(Exception):  # what is too large for the device says so when it is launched
        kernel._init_handles()


def compile_ahead(
    device: torch.device,
    works: Sequence[Callable[[], object]],
    tell: Callable[[], None] = lambda: None,
) -> None:
    """Compile what ``works`` will launch, and ``tell`` that it is done; on a GPU only.

    What goes wrong here is met again where it counts.
    """
    if device.type != "cuda":
        return
    began, builders = time.monotonic(), list[Builder]()
    try:
        with compiling_ahead(device) as dry:
            try:
                for work in works:
                    work()
            finally:  # beside Triton's threads, which are waited for on leaving
                builders = start_builders(dry.notes)
    except Exception as error:  # a dry run proves nothing; the real one follows
        logger.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)
    await_builders(builders, PATIENCE_S)
    seconds = time.monotonic() - began
    logger.info("compiled ahead in %.1f s, %d processes beside", seconds, len(builders))
    tell()


def start_builders(notes: Sequence[Note]) -> list[Builder]:
    """Processes that build what was noted, every job once; none where nothing was."""
    jobs: dict[str, dict[str, Any]] = {}
    for note in notes:
        text = json.dumps(note.job, sort_keys=True)
        jobs.setdefault(note.module, {})[text] = note.job
    started = []
    for module, noted in jobs.items():
        count = min(len(noted), MOST_PROCESSES, max(1, (os.cpu_count() or 2) // 2))
        for first in range(count):
            builder = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert builder.stdin is not None
            builder.stdin.write(json.dumps(list(noted.values())[first::count]))
            builder.stdin.close()
            started.append(builder)
    return started


def await_builders(builders: Sequence[Builder], seconds: float) -> None:
    """Wait for all; whoever takes longer than ``seconds`` is ended."""
    until = time.monotonic() + seconds
    for builder in builders:
        assert builder.stderr is not None
        try:
            builder.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            builder.kill()
            builder.wait()
        with builder.stderr as said:
            lines = said.read().strip().splitlines()
        if builder.returncode:
            last = lines[-1] if lines else f"it ended with {builder.returncode}"
            logger.warning("kernels that are built at their first use: %s", last)
