"""FP8 index keys in the byte map of vLLM and DeepGEMM ("index_k_132"), at any head width.

In:  index keys [N, D], after LayerNorm, RoPE and, where the model has it, Hadamard.
Out: the keys, dequantised; or, through `split`, codes and scales for operators that score in FP8.
Byte map of a PAGE of P tokens (two planes): first P * D bytes, all keys in e4m3, token by token;
     then P * 4 bytes, the float32 scale of each token. It is not P rows of D + 4 bytes, although
     other engines give the tensor that shape.
Group: the whole key shares one scale, a power of two (float8.py, index keys).
Ids: "index_k_{D + 4}", so "index_k_132" for D = 128 and "index_k_36" for D = 32; D % 4 == 0, so
     that the scales of a page are aligned. Version 1.
NaN and infinities: NaN (float8.py); a score made of it is NaN and raises its row's flag.
Queries: an index query is rounded as a key is, head by head, before it is scored
     (docs/decisions/0005): scores in FP8 and scores of the dequantised values are then one thing.
Not here: scoring, pooling of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gnomon.attention.layouts.base import HOST_OPERATIONS, KVLayout, Operation
from gnomon.attention.layouts.float8 import (
    decode_e4m3,
    e4m3_bound,
    encode_e4m3,
    finite_amax,
    index_key_scale,
    typed_columns,
)
from gnomon.attention.layouts.operations import DEVICE_OPERATIONS
from gnomon.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Fp8IndexKeyLayout(KVLayout):
    """`head_dim` = D, the width of an index key."""

    head_dim: int
    read_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.head_dim < 4 or self.head_dim % 4:
            raise LayoutError(
                f"index_k packs keys of a multiple of 4; got index_head_dim {self.head_dim}. "
                f"Use a plain layout such as bfloat16."
            )

    @property
    def id(self) -> str:
        return f"index_k_{self.bytes_per_token}"

    @property
    def version(self) -> int:
        return 1

    @property
    def dim(self) -> int:
        return self.head_dim

    @property
    def plane_widths(self) -> tuple[int, ...]:
        return (self.head_dim, 4)

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    @property
    def computed_dtype(self) -> torch.dtype:
        return self.read_dtype

    @property
    def alignment(self) -> int:
        return 4  # of the scales

    @property
    def operations(self) -> frozenset[Operation]:
        return HOST_OPERATIONS | DEVICE_OPERATIONS

    @property
    def rounds_queries(self) -> bool:
        return True

    def computing_in(self, dtype: torch.dtype) -> Self:
        return replace(self, read_dtype=dtype)

    def quantise(self, values: Tensor) -> Tensor:
        self.check_values(values)
        scales = index_key_scale(finite_amax(values))
        rows = values.new_empty((*values.shape[:-1], self.bytes_per_token), dtype=torch.uint8)
        rows[..., : self.head_dim] = encode_e4m3(values, scales)
        rows[..., self.head_dim :].view(torch.float32).copy_(scales.unsqueeze(-1))
        return rows

    def dequantise(self, rows: Tensor) -> Tensor:
        codes, scales = self.split(rows)
        return decode_e4m3(codes, scales).to(self.read_dtype)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes [..., D + 4] of gather_bytes -> e4m3 codes uint8 [..., D], scales float32 [...]."""
        self.check_rows(rows)
        scales = typed_columns(rows, self.head_dim, self.bytes_per_token, torch.float32)
        return rows[..., : self.head_dim], scales.squeeze(-1)

    def round_trip_bound(self, values: Tensor) -> Tensor:
        bound = e4m3_bound(values, index_key_scale(finite_amax(values)))
        # float64 is rounded to float32 on the way in.
        return bound * (1 + 2.0**-16) if values.dtype == torch.float64 else bound
