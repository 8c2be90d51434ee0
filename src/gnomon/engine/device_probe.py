"""What the GPU's driver can do, tried out before a weight is read: one kernel, one captured graph.

In:  the machine as it looks, the device flag.
Out: the machine that will be used and what it lacks, each with what is used instead. A GPU on which
     Triton starts no kernel (not installed, no compiler, a driver older than its code) is not used:
     sampling and every operator need it. One that captures no graph runs all steps eagerly. One
     whose memory others hold can do both: what is left is for the memory plan to refuse.
Errors: ConfigError where the GPU was asked for, or captures were.
Not here: what can be known without trying (machine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from gnomon.attention.dispatch import OpNeed
from gnomon.attention.providers import absent_providers
from gnomon.engine.config import EngineConfig
from gnomon.engine.machine import Machine, probe_machine
from gnomon.errors import ConfigError

LENGTH = 256


def launch_a_kernel() -> None:
    """RuntimeError, or the compiler's own error, where Triton's kernels do not start."""
    for provider in absent_providers():
        raise RuntimeError(provider.supports("rms_norm", OpNeed()).reason)
    from gnomon.engine.device_probe_triton import plus_one

    source = torch.zeros(LENGTH, device="cuda")
    if float(plus_one(source).sum()) != LENGTH:
        raise RuntimeError("a kernel that adds 1 gives something else")


def capture_a_graph() -> None:
    """RuntimeError where the driver captures or replays nothing."""
    source = torch.zeros(LENGTH, device="cuda")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        source.add(1)  # whatever is lazy
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = source.add(1)
    graph.replay()
    torch.cuda.synchronize()
    if float(result.sum()) != LENGTH:
        raise RuntimeError("a replayed graph gives something else")


TRIALS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"kernel": launch_a_kernel, "graph": capture_a_graph}
)


@dataclass(frozen=True, slots=True)
class Probed:
    """The machine to use; ``no_graphs``: why it captures none, empty if it does."""

    machine: Machine
    no_graphs: str = ""

    def words(self) -> list[str]:
        """What is lacking and what is used instead, a sentence each."""
        if not self.no_graphs:
            return []
        return [f"this driver captures no CUDA graphs ({self.no_graphs}): every step runs eagerly"]


def probe_driver(
    config: EngineConfig, machine: Machine, trials: Mapping[str, Callable[[], None]] = TRIALS
) -> Probed:
    """Try the driver of a GPU that is here (module docstring); a CPU has nothing to try."""
    if machine.device != "cuda" or not torch.cuda.is_available():
        return Probed(machine)
    fault = _fault_of(trials["kernel"])
    if fault and config.device == "cuda":
        raise ConfigError(
            f"device is 'cuda', but Triton starts no kernel on {machine.name}: {fault}. Mend that, "
            "or use --device cpu."
        )
    if fault:
        why = f"Triton starts no kernel on {machine.name}: {fault}"
        return Probed(replace(probe_machine("cpu"), passed_over=why))
    if config.enforce_eager:
        return Probed(machine)
    fault = _fault_of(trials["graph"])
    if fault and config.max_captured_prefill_tokens:
        raise ConfigError(
            f"max_captured_prefill_tokens is {config.max_captured_prefill_tokens}, but the driver "
            f"of {machine.name} captures no CUDA graphs: {fault}. Leave it out."
        )
    return Probed(machine, fault)


def _fault_of(trial: Callable[[], None]) -> str:
    try:
        trial()
    except torch.OutOfMemoryError:
        return ""
    except Exception as error:  # compilers and drivers have errors of their own classes
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}".rstrip(": .")
    return ""
