"""DeepGEMM's kernels built ahead: calls noted in a dry run, made again by processes of their own.

In:  the library; then calls, as the adapter makes them. As a program (`python -m`): jobs as JSON on
     stdin, each the name of a function and its arguments with tensors as shapes.
Out: `Noting`, the library behind a note-taker: outside a dry run a call goes through; within one it
     is noted and gives zeros. The program makes every call once, on zeros, so that the library's
     cache on the disk has its kernel. It ends with status 1 if a call failed. What was built before
     (deepgemm_memory.py) is not noted: with a warm cache no program starts.
Why: nvcc takes some five seconds for a kernel, and the library builds one at a time.
Not here: who starts the program (engine/compile_ahead.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dry_run import DryRun, Note, dry_run_here
from gnomon.attention.providers.external.deepgemm_memory import BuiltJobs
from gnomon.attention.providers.external.places import Places

PACKAGE = "deep_gemm"
SCORES, PAGED_SCORES = "fp8_mqa_logits", "fp8_paged_mqa_logits"
SCHEDULE = "get_paged_mqa_logits_metadata"
MOST_ROWS = 256  # of calls whose kernels do not hang on the number of rows and keys
MOST_KEYS = 1024
Spec = Any  # what JSON holds


class Noting:
    """The library (module docstring)."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._run: DryRun | None = None
        self._seen: set[str] = set()  # jobs of that run

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The library's function, or a note of its call."""
        function: Callable[..., Any] = getattr(self._library, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            run = dry_run_here()
            if run is None:
                return function(*args, **kwargs)
            self._note(run, (name, args, kwargs))
            return _zeros(name, args)

        return call

    def _note(self, run: DryRun, call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
        """Note a call, unless the cache on the disk has its kernel."""
        name, args, kwargs = call
        job = {
            "folder": str(Path(self._library.__file__).parent.parent),
            "function": name,
            "args": [spec_of(value) for value in _smaller(name, args)],
            "kwargs": {key: spec_of(value) for key, value in kwargs.items()},
        }
        if run is not self._run:
            self._run, self._seen = run, set()
        text = text_of(job)
        if text in self._seen:
            return
        self._seen.add(text)
        if not BuiltJobs.of(self._library, _device_of(args)).holds(text):
            run.notes.append(Note(__name__, job))


def text_of(job: Mapping[str, Any]) -> str:
    """A job as its memory has it."""
    return json.dumps(job, sort_keys=True)


def _device_of(args: tuple[Any, ...]) -> torch.device:
    """Of the call's first tensor."""
    first = args[0][0] if isinstance(args[0], tuple) else args[0]
    assert isinstance(first, Tensor)
    return first.device


def _smaller(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same call with fewer rows, keys and pages, where these choose no kernel."""
    if name == PAGED_SCORES:
        return (args[0], args[1][:1], *args[2:])
    if name != SCORES:
        return args
    q, (keys, scales), weights, first, stop = args
    rows = slice(0, MOST_ROWS)
    few = keys[:MOST_KEYS], scales[:MOST_KEYS]
    return (q[rows], few, weights[rows], first[rows], stop[rows])


def _zeros(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """What the call would give; None where it writes into an argument."""
    q: Tensor = args[0]
    if name == SCORES:
        return torch.zeros((q.shape[0], len(args[1][0])), dtype=torch.float32, device=q.device)
    if name == PAGED_SCORES:
        num_rows = q.shape[0] * q.shape[1]
        return torch.zeros((num_rows, args[6]), dtype=torch.float32, device=q.device)
    if name == SCHEDULE:
        return torch.zeros((args[2] + 1, 2), dtype=torch.int32, device=q.device)
    return None


def spec_of(value: Any) -> Spec:
    """A value as JSON: tensors by shape, strides and dtype, tuples as lists."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "strides": list(value.stride()), "dtype": dtype}
    if isinstance(value, tuple | list):
        return [spec_of(one) for one in value]
    return value


def value_of(spec: Spec, device: str) -> Any:
    """The value again; tensors are zeros."""
    if isinstance(spec, dict):
        dtype = getattr(torch, spec["dtype"])
        length = 1 + sum(
            (n - 1) * step for n, step in zip(spec["shape"], spec["strides"], strict=True)
        )
        memory = torch.zeros(length * dtype.itemsize, dtype=torch.uint8, device=device)
        return memory.view(dtype).as_strided(spec["shape"], spec["strides"])
    if isinstance(spec, list):
        return tuple(value_of(one, device) for one in spec)
    return spec


def build(jobs: list[dict[str, Any]], device: str = "cuda") -> int:
    """Make the calls and remember those that succeed; how many failed."""
    num_failed, place = 0, torch.device(device)
    for job in jobs:
        library = Places(job["folder"]).module(PACKAGE)
        args = [value_of(spec, device) for spec in job["args"]]
        kwargs = {key: value_of(spec, device) for key, spec in job["kwargs"].items()}
        try:
            getattr(library, job["function"])(*args, **kwargs)
            if place.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:  # it is met again where the kernel is needed
            sys.stderr.write(f"{job['function']}: {error}\n")
            num_failed += 1
        else:
            BuiltJobs.of(library, place).remember(text_of(job))
    return num_failed


if __name__ == "__main__":
    sys.exit(min(1, build(json.load(sys.stdin))))
