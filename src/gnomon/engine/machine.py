"""The machine that will run a model: probed here, or one of a table for plans without a GPU.

In:  the device flag, or a GPU's name.
Out: a Machine; ConfigError for a device that is not there or is too old, before anything is loaded;
     `shortcomings`: what the machine lacks, and what will be used instead; `require_left`: refuses
     a cache that is larger than what is left.
Not here: how its memory is divided (memory_plan.py), which provider can run (attention/dispatch).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import torch

from gnomon.attention.providers.external.places import cuda_home
from gnomon.cache.free_memory import free_memory_bytes
from gnomon.errors import ConfigError
from gnomon.models.quantised import FP8_CAPABILITY

GIB = 2**30
UNKNOWN_FREE_BYTES = 4 * GIB  # where the system does not tell
LEAST_CAPABILITY = (8, 0)  # bfloat16 tensor cores; Triton's kernels are built for no older GPU
DRIVER = Path("/proc/driver/nvidia")  # there where an NVIDIA driver runs


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that will run the model: "cpu" or "cuda", its memory in bytes.

    total_bytes, name, capability: of a GPU. passed_over: why a GPU that is there is not taken.
    """

    device: str
    free_bytes: int
    total_bytes: int = 0
    name: str = ""
    capability: tuple[int, int] | None = None
    passed_over: str = ""


# What torch sees of each, GiB: less than on the box, where memory is reserved for error correction.
KNOWN_GPUS = {
    name: Machine("cuda", int(gib * GIB), int(gib * GIB), name, capability)
    for name, gib, capability in (
        ("a100-40", 39.4, (8, 0)),
        ("a100-80", 79.2, (8, 0)),
        ("l40s", 44.4, (8, 9)),
        ("rtx4090", 23.5, (8, 9)),
        ("h100", 79.2, (9, 0)),
        ("h200", 139.8, (9, 0)),
        ("b200", 178.4, (10, 0)),
        ("rtx5090", 31.4, (12, 0)),
        ("rtx-pro-6000", 95.0, (12, 0)),
    )
}


def known_gpu(name: str) -> Machine:
    """A GPU of the table; ConfigError with the nearest name."""
    found = KNOWN_GPUS.get(name.lower())
    if found is None:
        near = [known for known in KNOWN_GPUS if known.startswith(name.lower()) and name]
        near = near or difflib.get_close_matches(name.lower(), KNOWN_GPUS, n=1)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(f"gpu is {name!r}; known are {', '.join(KNOWN_GPUS)}.{hint}")
    return found


def probe_machine(device: str) -> Machine:
    """The machine for a device flag ("auto", "cpu", "cuda"). ConfigError if it cannot be used.

    "auto" takes a GPU if there is one that is new enough; else ``passed_over`` says why it did not.
    """
    passed_over = ""
    has_cuda = torch.cuda.is_available() if device != "cpu" else False
    if device == "cuda" and not has_cuda:
        raise ConfigError(
            f"device is 'cuda', but torch finds no CUDA device ({_why_no_cuda()}); use cpu, or a "
            "CUDA build of torch on a machine with a GPU"
        )
    if has_cuda:
        free, total = torch.cuda.mem_get_info()
        gpu = torch.cuda.get_device_properties(0)
        machine = Machine("cuda", free, total, str(gpu.name), (int(gpu.major), int(gpu.minor)))
        if device == "cuda":
            require_new_enough(machine)
        if is_new_enough(machine):
            return machine
        passed_over = _too_old(machine)
    elif device == "auto" and DRIVER.exists():
        passed_over = f"torch finds no CUDA device ({_why_no_cuda()})"
    known = free_memory_bytes("cpu")
    return Machine("cpu", UNKNOWN_FREE_BYTES if known is None else known, passed_over=passed_over)


def _why_no_cuda() -> str:
    """What torch says when it is asked for CUDA: no such build, no driver, too old a driver."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no types for it
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return "no device is visible"


def is_new_enough(machine: Machine) -> bool:
    """Whether gnomon's kernels run on this GPU; any CPU will do."""
    return machine.capability is None or machine.capability >= LEAST_CAPABILITY


def require_new_enough(machine: Machine) -> None:
    """ConfigError, with what to do, for a GPU that is too old."""
    if not is_new_enough(machine):
        raise ConfigError(f"{_too_old(machine)}. Use --device cpu, or another GPU.")


def _too_old(machine: Machine) -> str:
    return (
        f"{machine.name} has compute capability {_dotted(machine.capability)}; gnomon needs "
        f"{_dotted(LEAST_CAPABILITY)} (A100) or newer"
    )


def require_left(wish: str, num_bytes: int, machine: Machine, left: int) -> None:
    """ConfigError for a cache that is larger than what is left of the machine."""
    if num_bytes <= left or not machine.free_bytes:
        return
    beside, remedy = "beside the weights", "Lower it, or free memory."
    if machine.device == "cuda":
        beside = "of the GPU beside weights, steps and graphs"
        remedy = "Lower it, or raise --gpu-memory-utilization."
    raise ConfigError(
        f"{wish}, {num_bytes / GIB:.2f} GiB, but {left / GIB:.2f} GiB are left {beside}. {remedy}"
    )


def shortcomings(machine: Machine) -> list[str]:
    """What a GPU machine lacks, each with what is used instead.

    Of a CPU: which GPU it stands for. Triton's own needs are told by providers.builtin_providers.
    """
    if machine.device != "cuda":
        why = machine.passed_over
        return [f"a GPU is here, and the CPU is used: {why}"] if why else []
    found = []
    if cuda_home() is None:
        found.append(
            "no nvcc is found (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda): providers that "
            "compile CUDA C++ when they run (deepgemm, flashinfer) are not used; gnomon's own "
            "kernels do not need it"
        )
    if machine.capability is not None and machine.capability < FP8_CAPABILITY:
        found.append(
            f"{machine.name} multiplies no FP8 (compute capability {_dotted(machine.capability)}): "
            "FP8 caches are decoded, FP8 weights are dequantised (--weights fp8 keeps them, and "
            "decodes them at every product)"
        )
    return found


def _dotted(capability: tuple[int, int] | None) -> str:
    return "?" if capability is None else f"{capability[0]}.{capability[1]}"
