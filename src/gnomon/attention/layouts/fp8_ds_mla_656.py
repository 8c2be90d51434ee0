"""FP8 latents in the byte map of vLLM and FlashMLA ("fp8_ds_mla_656"), at any width.

In:  values [N, D_c + D_r], the concatenation [c | k_rope]. Out: the same, dequantised.
Byte map of a token (one plane, tokens side by side):
     [0, D_c)                       c in e4m3
     [D_c, D_c + 4 * num_groups)    float32 scale of each group, a power of two (float8.py, latents)
     then 2 * D_slot bytes          k_rope in bfloat16, unscaled
Groups: 128 consecutive latents where D_c is a multiple of 128; a smaller D_c is one group.
NoPE (D_r = 0): either no rope bytes, or a slot of D_slot = 64 zeros, which is what kernels written
     for 656 bytes read.
Ids: "fp8_ds_mla_656" (512 + 64), "fp8_ds_mla_528" (512, no slot), "fp8_ds_mla_656_nope" (512,
     empty slot); other widths carry them, as bytes alone would be ambiguous:
     "fp8_ds_mla_100_c64_r16", "fp8_ds_mla_68_c64_r0", "fp8_ds_mla_196_c64_r0_nope".
Version 1: power-of-two scales. Bytes of writers that stored amax / 448 itself are not of this id.
NaN and infinities: NaN in the latent part (float8.py); kept as they are in the rope part.
Not here: RMSNorm of c and RoPE of k_rope (the latent_write operator).
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
    latent_scale,
    typed_columns,
)
from gnomon.attention.layouts.operations import DEVICE_OPERATIONS
from gnomon.errors import LayoutError

GROUP_WIDTH = 128
EMPTY_ROPE_SLOT = 64


@dataclass(frozen=True, slots=True)
class Fp8LatentLayout(KVLayout):
    """`latent_dim` = D_c, `rope_dim` = D_r; `has_empty_rope_slot` only where D_r is 0."""

    latent_dim: int
    rope_dim: int
    has_empty_rope_slot: bool = False
    read_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        width = self.latent_dim
        is_grouped = width > 0 and (width % GROUP_WIDTH == 0 or width < GROUP_WIDTH)
        if not is_grouped or width % 4:
            raise LayoutError(
                f"fp8_ds_mla packs a latent of a multiple of 128, or of a multiple of 4 below "
                f"128; got kv_lora_rank {width}. Use a plain layout such as bfloat16."
            )
        if self.rope_dim < 0 or self.rope_dim % 2:
            raise LayoutError(
                f"fp8_ds_mla needs an even rope width >= 0; got qk_rope_head_dim {self.rope_dim}."
            )
        if self.has_empty_rope_slot and self.rope_dim:
            raise LayoutError(
                f"an empty rope slot is for NoPE models; got qk_rope_head_dim {self.rope_dim}."
            )

    @property
    def id(self) -> str:
        name = f"fp8_ds_mla_{self.bytes_per_token}"
        if self.latent_dim != 512 or self.rope_dim not in (0, 64):
            name += f"_c{self.latent_dim}_r{self.rope_dim}"
        return f"{name}_nope" if self.has_empty_rope_slot else name

    @property
    def version(self) -> int:
        return 1

    @property
    def dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def group_width(self) -> int:
        """Latents that share a scale."""
        return min(self.latent_dim, GROUP_WIDTH)

    @property
    def num_groups(self) -> int:
        """Scales per token."""
        return self.latent_dim // self.group_width

    @property
    def plane_widths(self) -> tuple[int, ...]:
        slot = EMPTY_ROPE_SLOT if self.has_empty_rope_slot else self.rope_dim
        return (self.latent_dim + 4 * self.num_groups + 2 * slot,)

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

    def computing_in(self, dtype: torch.dtype) -> Self:
        return replace(self, read_dtype=dtype)

    def quantise(self, values: Tensor) -> Tensor:
        self.check_values(values)
        lead = values.shape[:-1]
        groups = values[..., : self.latent_dim].reshape(*lead, self.num_groups, self.group_width)
        scales = latent_scale(finite_amax(groups))
        rows = values.new_zeros((*lead, self.bytes_per_token), dtype=torch.uint8)
        scales_end = self.latent_dim + 4 * self.num_groups
        rows[..., : self.latent_dim] = encode_e4m3(groups, scales).flatten(-2)
        rows[..., self.latent_dim : scales_end].view(torch.float32).copy_(scales)
        if self.rope_dim:
            rope = values[..., self.latent_dim :].to(torch.float32)
            rows[..., scales_end:].view(torch.bfloat16).copy_(rope)
        return rows

    def dequantise(self, rows: Tensor) -> Tensor:
        self.check_rows(rows)
        scales_end = self.latent_dim + 4 * self.num_groups
        codes = rows[..., : self.latent_dim]
        groups = codes.reshape(*rows.shape[:-1], self.num_groups, self.group_width)
        scales = typed_columns(rows, self.latent_dim, scales_end, torch.float32)
        latent = decode_e4m3(groups, scales).flatten(-2).to(self.read_dtype)
        if not self.rope_dim:
            return latent
        rope = typed_columns(rows, scales_end, self.bytes_per_token, torch.bfloat16)
        return torch.cat((latent, rope.to(self.read_dtype)), dim=-1)

    def round_trip_bound(self, values: Tensor) -> Tensor:
        lead = values.shape[:-1]
        groups = values[..., : self.latent_dim].reshape(*lead, self.num_groups, self.group_width)
        latent = e4m3_bound(groups, latent_scale(finite_amax(groups))).flatten(-2)
        rope = values[..., self.latent_dim :].double().abs() * 2.0**-8
        bound = torch.cat((latent, rope.clamp_min(2.0**-134)), dim=-1)
        # float64 is rounded to float32 on the way in.
        return bound * (1 + 2.0**-16) if values.dtype == torch.float64 else bound
