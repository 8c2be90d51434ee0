"""Repairs of Triton's CPU interpreter, so that it rounds as a GPU does.

In:  nothing; called once by whoever runs kernels under TRITON_INTERPRET=1 (tests, CI).
Out: conversions between float types inside the interpreter are torch's: nearest, ties to even, with
     NaN and subnormals right (environment.md §3). Round-to-zero conversions stay the interpreter's.
Not here: arithmetic on bf16 blocks, which no patch repairs: kernels widen first (language.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
BIT_TYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def repair() -> None:
    """Replace the interpreter's float conversion; a second call changes nothing."""
    original = interpreter._convert_float
    if getattr(original, "is_repaired", False):
        return

    def convert(bits: Any, source: tl.dtype, target: tl.dtype, rounding: Any) -> Any:
        held_as, wanted = TORCH_DTYPES.get(source.name), TORCH_DTYPES.get(target.name)
        is_truncation = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if is_truncation or held_as is None or wanted is None:
            return original(bits, source, target, rounding)
        held = np.ascontiguousarray(bits).view(BIT_TYPES[source.primitive_bitwidth])
        values = torch.from_numpy(held.reshape(-1).copy()).view(held_as).to(wanted)
        raw = values.view(torch.uint8).numpy().view(BIT_TYPES[target.primitive_bitwidth])
        return raw.reshape(np.shape(bits))

    convert.is_repaired = True  # type: ignore[attr-defined]  # a mark on the function itself
    interpreter._convert_float = convert
