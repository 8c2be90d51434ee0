"""The values that operators take and give beside plain tensors, geometry and pools.

In:  tables of a model (RoPE angles, the index keys' norm) and what one operator hands to the next.
Out: frozen values; every one that belongs to rows names its axis, so that an operator can refuse
     rows of another axis.
Not here: any computation beyond looking up RoPE rows (oracle_math.md §1.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnomon.attention.geometry import RowAxis, RowTensor
from gnomon.attention.indices import KeySet
from gnomon.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class RopeRows:
    """The rotation of each row of one axis: looked up once a step, used by every layer.

    ``cos``, ``sin`` [R, dim]: full width, the sine already signed, so that the rotated vector is
    ``x * cos + partner(x) * sin``; the partner of column 2i is 2i + 1 and the reverse when
    ``is_interleaved``, else columns i and i + dim / 2 are partners.
    """

    axis: RowAxis
    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    # complex [R, dim / 2] on a CPU where pairs are neighbours, else None: GPU kernels want none
    turn: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.is_interleaved and self.cos.is_cpu:
            object.__setattr__(self, "turn", self.pair_turns())

    def pair_turns(self) -> Tensor:
        """Return cos + i sin of each pair of neighbours, complex [R, dim / 2]."""
        return torch.complex(self.cos[:, 0::2].contiguous(), self.sin[:, 1::2].contiguous())

    @property
    def dim(self) -> int:
        """How many leading columns are rotated."""
        return int(self.cos.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """Cosines and sines of every position: ``cos``, ``sin`` [max_pos, dim / 2], fp32 or fp64."""

    cos: Tensor
    sin: Tensor

    def __post_init__(self) -> None:
        if self.cos.shape != self.sin.shape or self.cos.dim() != 2:
            raise ConfigError(
                f"RoPE tables must both be [max_pos, dim/2]; got cos {tuple(self.cos.shape)}, "
                f"sin {tuple(self.sin.shape)}"
            )
        if self.cos.dtype not in (torch.float32, torch.float64) or self.cos.dtype != self.sin.dtype:
            raise ConfigError(
                f"RoPE tables must be float32 or float64, both alike; got {self.cos.dtype} and "
                f"{self.sin.dtype}: rotation happens in fp32 and is rounded once"
            )

    def at(self, axis: RowAxis, is_interleaved: bool) -> RopeRows:
        """The rotations of an axis' rows. Padding rows have position 0, hence no rotation."""
        cos = self.cos.index_select(0, axis.position)
        sin = self.sin.index_select(0, axis.position)
        if is_interleaved:
            cos = cos.repeat_interleave(2, dim=-1)
            sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            cos = torch.cat((cos, cos), dim=-1)
            sin = torch.cat((-sin, sin), dim=-1)
        return RopeRows(axis, cos, sin, is_interleaved)


@dataclass(frozen=True, slots=True, eq=False)
class IndexTransform:
    """What a layer does to raw index queries and keys (oracle_math.md §1.5).

    Keys get LayerNorm(``norm_weight``, ``norm_bias``, ``norm_eps``); both get RoPE over the first
    ``rope.dim`` columns, then, if ``has_hadamard``, the Sylvester-ordered Hadamard matrix times
    Di ** -0.5 (Di a power of two). Make it once at load: it builds ``hadamard`` [Di, Di] (fp32 or
    wider) then.
    """

    norm_weight: Tensor
    norm_bias: Tensor
    norm_eps: float = 1e-6
    has_hadamard: bool = False
    hadamard: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not self.has_hadamard:
            return
        dim = self.norm_weight.shape[0]
        if dim & (dim - 1):
            raise ConfigError(
                f"a Hadamard transform needs a power of two; index_head_dim is {dim}. "
                "Turn index_hadamard off for this model"
            )
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < dim:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        dtype = torch.promote_types(self.norm_weight.dtype, torch.float32)
        scaled = (matrix * dim**-0.5).to(self.norm_weight.device, dtype)
        object.__setattr__(self, "hadamard", scaled)


@dataclass(frozen=True, slots=True, eq=False)
class Summands:
    """[R, D] that nobody has added up yet: Σ_p parts[p] of parts [P, R, D], rounded to ``dtype``.

    The sum is fp32, first to last. ``ids`` int64 [R, P], contiguous: part p of row r is there only
    if ids[r, p] >= 0; None: all are. ``total()`` adds them up, by a launch of its own.
    """

    parts: Tensor
    dtype: torch.dtype
    ids: Tensor | None
    total: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RowPages:
    """The pages of rows: row m has those of ``request[m]`` in ``pages`` [B, P] int32, 0 beyond.

    ``request`` int32 [M], −1 for padding rows (which have no entries); None: row m has pages[m].
    """

    pages: Tensor
    request: Tensor | None
    page_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What the indexer chose: a key set in POSITION space, one list segment, on the query's axis.

    ``margin`` [R] (if asked): the k-th minus the (k+1)-th score of a row, +inf where nothing was
    cut. ``nan_rows`` [R] bool: a score that the row's choice hung on was NaN, and counted as −inf;
    never of a row that takes all its keys, whoever chose.
    """

    keys: KeySet
    margin: Tensor | None
    nan_rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOut:
    """``out`` [R, H, D] in the query's dtype; ``lse`` [R, H] natural log, −inf for an empty row."""

    out: RowTensor
    lse: RowTensor


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The exact k best columns of every row: higher score first, ties to the lower column.

    ``ids`` [M, k] int32 ascending, −1 after ``count`` [M] int32 = min(k, valid columns);
    ``margin`` [M] as in Selection, or None; ``nan_rows`` [M] bool. ``slots`` [M, k] int64: the
    slots of ``ids`` where the kernel was given the rows' pages.
    """

    ids: Tensor
    count: Tensor
    margin: Tensor | None
    nan_rows: Tensor
    slots: Tensor | None = None
