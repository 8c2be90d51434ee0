"""What the index kernels read and write, as plain tensors: pools, codes of rows, rows of scores.

In:  pools, queries or keys. Out: views and new tensors with the strides that the kernels assume.
Codes are those of layouts/float8.py (index keys): values that are codes times a power of two come
back as such exactly, because rounding them again changes nothing.
Not here: scores (index.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.attention.layouts.base import Operation, PagedPool
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.providers.triton.index_codes import encode_rows_kernel, gather_codes_kernel
from gnomon.attention.providers.triton.language import IS_INTERPRETED, has_native_fp8, padded
from gnomon.errors import UnsupportedError

CODE = torch.float8_e4m3fn
FEWEST_HEADS = 16  # a dot's columns
FEWEST_COLUMNS = 32  # a dot's depth in FP8
ENCODE_BLOCK = 32
ROW_ALIGNMENT = 32  # columns: rows of scores begin at multiples of 128 bytes
FEWEST_PROCESSORS = 4  # what a CPU counts as under the interpreter
HOPPER = (9, 0)
REGISTERS = 200  # a thread, of kernels that are capped, on other GPUs
KEY_BLOCK = 128  # keys side by side are padded to a multiple


@dataclass(frozen=True, slots=True)
class Tile:
    """``queries``: rows times padded heads of a tile; ``keys`` of it; ``stages``, ``warps``.

    ``registers``: at most so many a thread on Hopper, for more programs at once; other GPUs hold
    operands of a product in registers as well, and are told REGISTERS (left alone, the assembler of
    sm_120 stops at 128 and keeps numbers on the stack).
    """

    queries: int
    keys: int
    stages: int
    warps: int
    registers: int | None = None

    def rows(self, num_heads: int) -> int:
        """Rows of a tile, each of ``num_heads`` padded heads."""
        return max(1, self.queries // num_heads)

    def most_registers(self, device: torch.device) -> int | None:
        """What a kernel is compiled with on this device."""
        if self.registers is None or _capability(device) == HOPPER:
            return self.registers
        return REGISTERS


TILES = {  # of contiguous keys; measured on an H200
    CODE: Tile(128, 64, 4, 4, 128),
    torch.bfloat16: Tile(128, 64, 3, 4),
    torch.float16: Tile(128, 64, 3, 4),
    torch.float32: Tile(64, 32, 2, 8),  # IEEE dots run on the plain ALUs
}
PAGED_TILES = {  # of paged keys; ``queries`` is one row's heads
    CODE: Tile(1, KEY_BLOCK, 3, 4),
    torch.bfloat16: Tile(1, KEY_BLOCK, 2, 4),
    torch.float16: Tile(1, KEY_BLOCK, 2, 4),
    torch.float32: Tile(1, 32, 2, 8),
}


@dataclass(frozen=True, slots=True)
class PoolView:
    """``keys``: numbers [pages, P, D], or bytes [pages, ...] that begin with a page's codes.

    ``scales`` float32 [pages, P, 1] of codes. ``kind``: how the keys are multiplied, see
    index_tiles.py.
    """

    keys: Tensor
    scales: Tensor | None
    kind: str


def view_of(pool: PagedPool) -> PoolView:
    """The pool as the paged kernel reads it. UnsupportedError for a layout that it cannot read."""
    if Operation.TYPED_VIEW in pool.layout.operations:
        return PoolView(pool.typed_pages(), None, "plain")
    if not isinstance(pool.layout, Fp8IndexKeyLayout):
        raise UnsupportedError(
            f"the triton index kernels read plain layouts and index_k; got {pool.layout.id}. "
            "Use --index-backend torch"
        )
    codes, scales = pool.planes[0], pool.planes[1].view(torch.float32)
    if multiplies_codes(pool.device) and padded(pool.layout.dim, FEWEST_COLUMNS) == pool.layout.dim:
        return PoolView(codes.view(CODE), scales, "codes")
    return PoolView(codes, scales, "decoded")


def cast_of(pool: PagedPool, query: torch.dtype) -> str:
    """How the paged kernel turns a plain pool's numbers into what the layout reads (CAST)."""
    stored, computed = pool.layout.stored_dtype, pool.layout.computed_dtype
    if stored == computed or Operation.TYPED_VIEW not in pool.layout.operations:
        return "" if computed == query else "wide"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(computed, "wide")


def multiplies_codes(device: torch.device) -> bool:
    """Whether the device has dots of e4m3 by e4m3 (the interpreter does)."""
    return IS_INTERPRETED or has_native_fp8(device)


def encoded(rows: Tensor, inner: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Codes [M', inner, DIM] (uint8) and scales [M', inner] of rows [M, H, D], padded with zeros.

    M' is M, rounded up to a multiple of ``multiple`` and of ENCODE_BLOCK.
    """
    rows = side_by_side(rows)
    num_rows, num_inner, dim = rows.shape
    padded_rows = -(-num_rows // max(multiple, ENCODE_BLOCK)) * max(multiple, ENCODE_BLOCK)
    width, device = padded(dim, FEWEST_COLUMNS), rows.device
    codes = torch.empty((padded_rows, inner, width), dtype=torch.uint8, device=device)
    scales = torch.empty((padded_rows, inner), dtype=torch.float32, device=device)
    if padded_rows:
        encode_rows_kernel[(padded_rows * inner // ENCODE_BLOCK,)](
            rows,
            codes,
            scales,
            num_rows,
            rows.stride(0),
            rows.stride(1),
            INNER=num_inner,
            PADDED_INNER=inner,
            D=dim,
            DIM=width,
            BLOCK=ENCODE_BLOCK,
            NATIVE=has_native_fp8(device),
        )
    return codes, scales


def gathered_codes(
    pool: PagedPool, pages: Tensor, num_keys: int, multiple: int
) -> tuple[Tensor, Tensor]:
    """Codes [N', DIM] (uint8) and scales [N'] of entries 0 .. num_keys − 1 of ``pages`` [P].

    N' is num_keys, rounded up to a multiple of ``multiple``; zeros behind.
    """
    plane, scale_plane = pool.planes[0], pool.planes[1].view(torch.float32)
    padded_keys = -(-num_keys // multiple) * multiple
    width, device = padded(pool.layout.dim, FEWEST_COLUMNS), pool.device
    codes = torch.empty((padded_keys, width), dtype=torch.uint8, device=device)
    scales = torch.empty(padded_keys, dtype=torch.float32, device=device)
    if padded_keys:
        gather_codes_kernel[(padded_keys // ENCODE_BLOCK,)](
            plane,
            scale_plane,
            pages,
            codes,
            scales,
            num_keys,
            plane.stride(0),
            scale_plane.stride(0),
            PAGE=pool.page_size,
            D=pool.layout.dim,
            DIM=width,
            BLOCK=ENCODE_BLOCK,
        )
    return codes, scales


def score_rows(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Uninitialised fp32 [num_rows, width] whose rows begin at multiples of 128 bytes."""
    stride = -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT
    rows = torch.empty((num_rows, stride), dtype=torch.float32, device=device)
    return rows[:, :width]


def side_by_side(x: Tensor) -> Tensor:
    """``x`` with its last dimension's numbers next to each other; copied only if they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device; it sizes grids and changes no result."""
    return _multiprocessors(device) if device.type == "cuda" else FEWEST_PROCESSORS


def parts_of(num_rows: int, resident: int) -> int:
    """Programs a row: few, yet so that ``resident`` programs at once leave few places empty."""
    most = max(1, 4 * resident // num_rows)
    full = [
        num_rows * parts / (resident * -(-num_rows * parts // resident))
        for parts in range(1, most + 1)
    ]
    return next(parts for parts, share in enumerate(full, 1) if share >= max(full) - 0.05)
