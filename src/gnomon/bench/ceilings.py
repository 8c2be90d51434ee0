"""What the device can do at most, measured in the run whose figures it judges.

In:  a device. Out: Ceilings: bytes a second of a copy, operations a second of matrix products.
A ceiling from a datasheet, or from another day, makes shares of it meaningless.
Not here: the operators (ops.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.bench.timing import Call, Failure, time_calls
from gnomon.errors import UnsupportedError

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes read and written a second; operations (a multiply-add is two) a second, or None."""

    copy_bytes_s: float
    matmul_flop_s: float
    fp8_matmul_flop_s: float | None


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy of 2 GiB and products of 8192³ on CUDA (64 MiB and 1024³ on a CPU); about a second."""
    is_cuda = device.type == "cuda"
    num_bytes, size = (2 << 30, 8192) if is_cuda else (64 << 20, 1024)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}
    if is_cuda:
        calls["fp8"] = _fp8_product(a, b)
    times = time_calls(calls, device, num_runs=10)
    flop = 2 * size**3

    def rate(name: str, amount: float) -> float | None:
        timing = times.get(name, Failure(""))
        return None if isinstance(timing, Failure) else amount / (timing.median_us * 1e-6)

    copy, product = rate("copy", 2 * num_bytes), rate("matmul", flop)
    if copy is None or product is None:
        raise UnsupportedError(f"plain torch cannot copy or multiply on {device}: {times}")
    return Ceilings(copy, product, rate("fp8", flop))


def _fp8_product(a: Tensor, b: Tensor) -> Call:
    left, right = a.to(FP8), b.to(FP8).t()
    one = torch.ones((), device=a.device)

    def product() -> Tensor:
        return torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)

    return product
