"""What cache layouts can be asked to do.

In:  nothing. Out: names of operations, and the set that every layout of this package owns.
A layout lists the operations that it owns; where one is needed, a layout without it is refused.
"""

from __future__ import annotations

from enum import StrEnum


class Operation(StrEnum):
    """What a layout can be asked to do; one that lacks it cannot be chosen where it is needed."""

    WRITE = "write"
    GATHER = "gather"
    GATHER_RANGE = "gather_range"
    QUANTISE = "quantise"
    DEQUANTISE = "dequantise"
    TYPED_VIEW = "typed_view"  # the pool seen as a [slots, D] tensor, no bytes moved
    DEVICE_LOAD = "device_load"  # a Triton function that fused kernels inline to load a token
    DEVICE_STORE = "device_store"  # likewise, to store one


DEVICE_OPERATIONS = frozenset({Operation.DEVICE_LOAD, Operation.DEVICE_STORE})
"""Of layouts with device functions (providers/triton/layout_rows.py)."""

HOST_OPERATIONS = frozenset(
    {
        Operation.WRITE,
        Operation.GATHER,
        Operation.GATHER_RANGE,
        Operation.QUANTISE,
        Operation.DEQUANTISE,
    }
)
