"""SegmentBuffers: device memory of fixed addresses for captured parts of a prefill step.

In:  the largest bucket, the model's config. Per step a Batch, which is on the device already.
Out: views that stay where they are for the buffers' life: `rows(bucket)`, what a step is;
     `asked(bucket)`, what a part leaves for the attention behind it; `attended(bucket)`, what that
     leaves for the next part; `stream(bucket)`, what parts leave for each other.
     `refresh(batch, bucket)` makes `rows` describe a step: two launches, and one more that clears
     the padding rows of `attended`.
One set serves all layers and buckets: parts and attentions take turns, and only one step runs.
Every bucket divides the two buffers (int64 and int32) into lines of its own rows, one line behind
the other, so that one concatenation fills all lines of a kind. What stands behind the live rows is
padding (request -1, position 0, kv_len 0, slot -1, token 0, attended 0).
Not here: what runs on them (prefill_graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.attention.geometry import require_axis
from gnomon.attention.segment_plan import SegmentRows
from gnomon.engine.batch import Batch
from gnomon.errors import GeometryError
from gnomon.models.config import ModelConfig


class SegmentBuffers:
    """The owner of the buffers (module docstring)."""

    def __init__(
        self,
        groups: Sequence[str],
        max_rows: int,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``dtype``: the model's."""
        self.max_rows = max_rows
        self._groups = tuple(groups)
        num_long = 1 + len(self._groups)
        self._long = torch.full((num_long * max_rows,), -1, dtype=torch.int64, device=device)
        self._int = torch.zeros(3 * max_rows, dtype=torch.int32, device=device)
        heads, index_heads = config.num_attention_heads, config.index_n_heads

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros((max_rows, *shape), dtype=dtype, device=device)

        self._stream = zeros(config.hidden_size)
        self._attended = zeros(heads * config.v_head_dim)
        self._asked = (
            zeros(heads, config.qk_nope_head_dim),
            zeros(heads, config.qk_rope_head_dim),
            zeros(index_heads, config.index_head_dim),
            zeros(index_heads, dtype=torch.promote_types(dtype, torch.float32)),
        )
        self._padding = {
            (value, kind): torch.full((max_rows,), value, dtype=kind, device=device)
            for value in (0, -1)
            for kind in (torch.int64, torch.int32)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in (*self._held(), *self._padding.values()))

    def rows(self, bucket: int) -> SegmentRows:
        """The lines of ``bucket`` rows."""
        token_ids, *slots = self._lines(self._long, bucket, 1 + len(self._groups))
        request, position, kv_len = self._lines(self._int, bucket, 3)
        by_group = dict(zip(self._groups, slots, strict=True))
        return SegmentRows(token_ids, request, position, kv_len, by_group)

    def attended(self, bucket: int) -> Tensor:
        """[bucket, H * dv]: zeros but for the rows that a layer's attention writes."""
        return self._attended[:bucket]

    def stream(self, bucket: int) -> Tensor:
        """[bucket, D]: the residual stream between two parts; hidden states behind the last one."""
        return self._stream[:bucket]

    def asked(self, bucket: int, count: int) -> tuple[Tensor, ...]:
        """The first ``count`` of: queries without position [bucket, H, dn], with it [bucket, H,
        D_r], index queries [bucket, Hi, Di], their heads' weights [bucket, Hi].
        """
        return tuple(held[:bucket] for held in self._asked[:count])

    def clear(self, bucket: int) -> None:
        """All rows of a bucket become padding: what a capture finds."""
        nothing = self._padding
        zero, none = nothing[0, torch.int64], nothing[-1, torch.int64]
        torch.cat(
            [zero[:bucket], *[none[:bucket] for _ in self._groups]], out=self._used(bucket)[0]
        )
        zero, none = nothing[0, torch.int32], nothing[-1, torch.int32]
        torch.cat([none[:bucket], zero[:bucket], zero[:bucket]], out=self._used(bucket)[1])
        self._attended[:bucket].zero_()

    def refresh(self, batch: Batch, bucket: int) -> None:
        """Make the lines of ``bucket`` describe this step; waits for nothing.

        GeometryError for token ids of another axis, or more rows than the bucket has.
        """
        geometry, rows = batch.geometry, batch.geometry.rows
        require_axis(rows, token_ids=batch.token_ids)
        missing = bucket - rows.num_rows
        if not 0 <= missing <= bucket <= self.max_rows:
            raise GeometryError(
                f"buffers of {self.max_rows} rows cannot hold {rows.num_rows} rows of "
                f"'{rows.label}' in a bucket of {bucket}"
            )
        long, small = self._used(bucket)
        zero, none = self._padding[0, torch.int64], self._padding[-1, torch.int64]
        lines = [batch.token_ids.data, zero[:missing]]
        for group in self._groups:
            lines += [geometry.writes[group].slots, none[:missing]]
        torch.cat(lines, out=long)
        zero, none = self._padding[0, torch.int32], self._padding[-1, torch.int32]
        padded = zero[:missing]
        lines = [rows.request, none[:missing], rows.position, padded, rows.kv_len, padded]
        torch.cat(lines, out=small)
        if missing:
            self._attended[rows.num_rows : bucket].zero_()

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are."""
        return tuple(held.data_ptr() for held in self._held())

    def _held(self) -> tuple[Tensor, ...]:
        return (self._long, self._int, self._stream, self._attended, *self._asked)

    def _used(self, bucket: int) -> tuple[Tensor, Tensor]:
        return self._long[: (1 + len(self._groups)) * bucket], self._int[: 3 * bucket]

    def _lines(self, buffer: Tensor, bucket: int, count: int) -> list[Tensor]:
        return [buffer[line * bucket : (line + 1) * bucket] for line in range(count)]
