"""Stream a checkpoint folder into the engine's parameters.

In:  a folder, its `ModelConfig`, the engine's dtype and device, a progress callback.
Out: a tensor per parameter, or codes and scales where FP8 stays. Peak memory is the parameters and
     one staging buffer.
     `CheckpointError` if the names do not match (before allocation), if a file ends early, or if a
     value does not fit a narrower dtype.
How: plain reads, never a memory map (mapped pages of a file count as memory of the process). Bytes
     of the right dtype go straight to their place; others pass a buffer of bounded size.
Not here: matching (load_plan), drawing progress (cli), sharding over ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.errors import CheckpointError
from gnomon.models.checkpoint import StoredTensor, read_checkpoint
from gnomon.models.config import BlockFp8, ModelConfig
from gnomon.models.fp8_storage import empty_codes
from gnomon.models.linear import Param, tensor
from gnomon.models.load_plan import Fill, LoadPlan, plan_load
from gnomon.models.params import param_dtype, with_tied_head
from gnomon.models.quantised import dequantise_blocks, may_stay_fp8, scale_region

STAGING_BYTES = 4 << 20  # in a file's dtype; FP8 takes 8 times as much again while it is scaled
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load has come; sent after each stored tensor."""

    bytes_done: int
    bytes_total: int
    shard: str


ProgressCallback = Callable[[LoadProgress], None]


def load_model_params(
    folder: Path | str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: ProgressCallback | None = None,
) -> dict[str, Tensor]:
    """Every parameter by its engine name (params.py), from a checkpoint folder; FP8 dequantised."""
    plan = plan_load(read_checkpoint(Path(folder)), config)
    params = load_planned(plan, dtype, device, progress)
    return {name: tensor(params, name) for name in params}


def load_planned(
    plan: LoadPlan,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: ProgressCallback | None = None,
    has_fp8: bool = False,
) -> dict[str, Param]:
    """Carry out a plan. Each stored tensor is read once, in the order of the files.

    `has_fp8`: linear layers that are FP8 in the files stay so (128 × 128 blocks).
    """
    block, kept = plan.config.quantization, fp8_names(plan) if has_fp8 else frozenset()
    params: dict[str, Param] = {}
    if block is not None:
        params |= empty_codes([spec for spec in plan.specs if spec.name in kept], block, device)
    for spec in plan.specs:
        if spec.name not in params:
            dtype_of = param_dtype(spec, dtype)
            params[spec.name] = torch.empty(spec.shape, dtype=dtype_of, device=device)
    done, total = 0, plan.num_bytes
    with ExitStack() as stack:
        reader = _Reader(stack)
        for fill in plan.fills:
            _fill(reader, fill, params[fill.spec.name], plan.config.quantization)
            done += fill.stored.num_bytes + (fill.scales.num_bytes if fill.scales else 0)
            if progress is not None:
                progress(LoadProgress(done, total, fill.stored.path.name))
    return with_tied_head(plan.config, params)


def fp8_names(plan: LoadPlan) -> frozenset[str]:
    """Parameters that can stay FP8: layers whose stored tensors all are. Experts: both or none."""
    plain = {fill.spec.name for fill in plan.fills if fill.scales is None}
    names = {spec.name for spec in plan.specs if may_stay_fp8(spec)} - plain
    alone = {n for n in names if ".experts." in n and not {_partner(n), n} <= names}
    return frozenset(names - alone)


def _partner(name: str) -> str:
    layer, _, matrix = name.rpartition(".")
    return f"{layer}.{'down' if matrix == 'gate_up' else 'gate_up'}"


def _fill(reader: _Reader, fill: Fill, param: Param, block: BlockFp8 | None) -> None:
    """Read one stored tensor, and its scales, into its place."""
    region = fill.source.index
    if isinstance(param, BlockFp8Weight):
        assert fill.scales is not None  # fp8_names
        reader.fill(fill.stored, param.codes[region])
        reader.fill(fill.scales, param.scales[scale_region(region)])
    elif fill.scales is None:
        reader.fill(fill.stored, param[region])
    else:
        _fill_quantised(reader, fill, param[region], block)


class _Reader:
    """Open files and one staging buffer."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._files: dict[Path, int] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def fill(self, stored: StoredTensor, place: Tensor) -> None:
        """Read a whole tensor into `place` (contiguous), converting where dtypes differ."""
        dtype = TORCH_DTYPES[stored.dtype]
        if place.dtype is dtype and place.device.type == "cpu":
            self._read(stored, 0, place)
            return
        rows = place.view(-1, place.shape[-1]) if place.dim() > 1 else place.view(-1, 1)
        step = max(1, STAGING_BYTES // (rows.shape[1] * dtype.itemsize))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            put(part, self.read_rows(stored, start, part.shape), stored.key)

    def read_rows(self, stored: StoredTensor, start: int, shape: torch.Size) -> Tensor:
        """Rows `start`.. of a stored matrix [*, shape[1]], in the staging buffer: use them up."""
        dtype = TORCH_DTYPES[stored.dtype]
        num_bytes = shape.numel() * dtype.itemsize
        if len(self._staging) < num_bytes:
            self._staging = torch.empty(max(num_bytes, STAGING_BYTES), dtype=torch.uint8)
        part = self._staging[:num_bytes].view(dtype).view(shape)
        self._read(stored, start * shape[1] * dtype.itemsize, part)
        return part

    def _read(self, stored: StoredTensor, offset: int, into: Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes at `offset` of a stored tensor."""
        file = self._open(stored.path)
        left = into.view(-1).view(torch.uint8).numpy().data
        position = stored.start + offset
        while left:
            count = os.preadv(file, [left], position)
            if count == 0:
                raise CheckpointError(
                    f"{stored.path} is truncated: '{stored.key}' needs {len(left)} bytes at "
                    f"{position}, found none. It was changed during the load; copy it anew."
                )
            left, position = left[count:], position + count

    def _open(self, path: Path) -> int:
        if path not in self._files:
            file = self._stack.enter_context(path.open("rb", buffering=0))
            self._files[path] = file.fileno()
        return self._files[path]


def _fill_quantised(reader: _Reader, fill: Fill, place: Tensor, block: BlockFp8 | None) -> None:
    """Read codes by whole rows of blocks, scale them and put them in place."""
    assert block is not None  # the plan refuses FP8 tensors without a block format
    assert fill.scales is not None
    compute = torch.promote_types(place.dtype, torch.float32)
    scales = torch.empty(fill.scales.shape, dtype=compute)
    reader.fill(fill.scales, scales)
    num_rows, num_columns = fill.stored.shape[-2:]
    step = max(1, STAGING_BYTES // (num_columns * block.block_rows)) * block.block_rows
    matrices = place.view(-1, num_rows, num_columns)
    for number, grid in enumerate(scales.view(-1, *scales.shape[-2:])):
        for start in range(0, num_rows, step):
            part = matrices[number, start : start + step]
            codes = reader.read_rows(fill.stored, number * num_rows + start, part.shape)
            first = start // block.block_rows
            of_rows = grid[first : first + step // block.block_rows]
            put(part, dequantise_blocks(codes, of_rows, block, compute), fill.stored.key)


def put(place: Tensor, values: Tensor, key: str) -> None:
    """Copy with conversion; values that overflow float16 are an error, not infinities."""
    place.copy_(values)
    is_narrowed = place.dtype is torch.float16 and values.dtype is not torch.float16
    if is_narrowed and not bool(torch.isfinite(place).all()):
        raise CheckpointError(
            f"Tensor '{key}' does not fit float16: largest magnitude "
            f"{float(values.float().abs().max()):g}, allowed 65504. Use bfloat16 or float32."
        )
