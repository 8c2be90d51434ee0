"""Kernels of a step compiled side by side, before the step runs for the first time.

In:  a device; within the context, work that launches kernels, in the shapes that will be met.
Out: nothing but compiled kernels. Within the context Triton's launches compile in threads (its
     compiler works outside Python's lock) and run nothing; on leaving, all of them are done.
     One by one, as a first run meets them, they take half a second each, and a step has dozens.
What was not computed is zeros, not what the memory held before: torch's own kernels and those of
other libraries do run, and zeros are valid ids, slots and counts to them. A kernel that cannot be
compiled fails here without a word and again, with one, where it is needed.
Not here: the work (graphs.py, prefill_graphs.py, warm_up.py), Triton's cache on the disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

MOST_THREADS = 16
UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class Zeroed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Fresh memory is zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; clear what it leaves undefined."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in UNDEFINED and isinstance(result, Tensor):
            result.zero_()
        return result


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """The context (module docstring); elsewhere than on a GPU it changes nothing."""
    if device.type != "cuda":
        yield
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
    zeroed = Zeroed()  # type: ignore[no-untyped-call]  # torch has no types
    with (
        ThreadPoolExecutor(threads, "compile") as pool,
        AsyncCompileMode(pool, ignore_errors=True),
        zeroed,
    ):
        JITFunction.run, JITFunction._do_compile = compile_only, remembered
        try:
            yield
        finally:
            JITFunction.run, JITFunction._do_compile = launch, build


def compile_ahead(device: torch.device, works: Sequence[Callable[[], object]]) -> None:
    """Compile what ``works`` will launch. What goes wrong here is met again where it counts."""
    if device.type != "cuda":
        return
    try:
        with compiling_ahead(device):
            for work in works:
                work()
    except Exception as error:  # a dry run proves nothing; the real one follows
        logger.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)
