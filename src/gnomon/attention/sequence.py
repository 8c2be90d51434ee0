"""Rows as sequences: for operators that run along a request's tokens, not row by row.

In:  a row axis that holds whole requests (of one rank, or gathered), and the request axis.
Out: ``SequenceView``: which row holds each token, request after request in token order.
Not here: the state itself (recurrent state, convolution tail, compressor ring), attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.axes import RequestAxis, RowAxis
from gnomon.errors import GeometryError

__all__ = ["SequenceView", "sequence_view", "token_order"]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceView:
    """``axis`` in token order, even where its rows are strided over ranks.

    order: int64 [L], the row of each token; request b's tokens are order[cu_len[b]:cu_len[b + 1]]
    with ascending positions. cu_len: int32 [B + 1], starts at 0, ends at L. length: int32 [B],
    how many of them are live: after an ``advance`` on the device the last ones may be rejected.
    state_slot: int64 [B], where a request's state lives; -1 for none.
    """

    axis: RowAxis
    order: Tensor
    cu_len: Tensor
    length: Tensor
    state_slot: Tensor


def token_order(axis: RowAxis) -> np.ndarray:
    """Rows inside spans, int64, request after request with ascending positions; no padding."""
    request, position = axis.host_rows()
    order: np.ndarray = np.lexsort((position, request))
    live: np.ndarray = order[request[order] >= 0]
    return live


def sequence_view(
    axis: RowAxis, requests: RequestAxis, state_slot: Sequence[int] | None = None
) -> SequenceView:
    """The sequences of ``axis``; a request without rows on it is an empty sequence.

    Raises GeometryError if some but not all of a request's rows are on the axis (one rank's
    shard, a cut by split()): a state that skips tokens would be wrong without a word.
    """
    num_requests = requests.num_requests
    order = token_order(axis)
    request, position = axis.host_rows()
    count = np.bincount(request[order], minlength=num_requests)
    for b in range(num_requests):
        expected = requests.host.query_len[b]
        if count[b] not in (0, expected):
            raise GeometryError(
                f"sequence view of '{axis.label}': it has {count[b]} of the {expected} rows of "
                f"request {b}; gather the rows of all ranks, or cut at request boundaries"
            )
    joins = request[order][1:] == request[order][:-1]
    if (joins & (np.diff(position[order]) != 1)).any():
        raise GeometryError(f"sequence view of '{axis.label}': positions of a request skip")
    cu_len = np.concatenate(([0], np.cumsum(count))).astype(np.int32)
    slots = [-1] * num_requests if state_slot is None else list(state_slot)
    if len(slots) != num_requests:
        raise GeometryError(
            f"sequence view of '{axis.label}': {len(slots)} state slots, {num_requests} requests"
        )

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(axis.device, non_blocking=True)

    present = put(count.astype(np.int32))
    length = torch.minimum(requests.query_len, present)
    return SequenceView(axis, put(order), put(cu_len), length, put(np.array(slots, np.int64)))
