"""The full check of a geometry: device values against the contract and against the host twins.

In:  a Geometry (duck-typed here, so that geometry.py can call this), and pool sizes.
Out: nothing, or GeometryError that names the axis, row, value and rule.
Not here: the cheap checks at birth (they are in the values' own classes), and index lists.

Invariants of reference/sglang_dsa.md section 2.5, by number, in the rule texts: I1-I4, I6, I8,
I10, I12. This reads device tensors and so waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnomon.attention.axes import RequestAxis, RowAxis
from gnomon.errors import GeometryError

if TYPE_CHECKING:
    from gnomon.attention.geometry import Geometry, PageTable, WriteSlots

__all__ = ["check_geometry"]


def check_geometry(geometry: Geometry, num_pages: Mapping[str, int]) -> None:
    """Raise GeometryError at the first value that breaks an invariant."""
    requests = geometry.requests
    _check_requests(requests)
    axes = {id(axis): axis for w in geometry.writes.values() for axis in (w.axis, w.local) if axis}
    axes[id(geometry.rows)] = geometry.rows
    for axis in axes.values():
        _check_rows(axis, requests)
    for group, table in geometry.tables.items():
        _check_table(table, geometry, num_pages.get(group))
        if group in geometry.writes:
            _check_writes(table, geometry.writes[group])


def _check_requests(requests: RequestAxis) -> None:
    host = requests.host
    for name, device, twin in (
        ("query_len", requests.query_len, host.query_len),
        ("kv_len", requests.kv_len, host.kv_len),
    ):
        value = device.cpu().long()
        upper = torch.tensor(twin, dtype=torch.int64)
        bad = value != upper if host.is_exact else (value > upper) | (value < 0)
        allowed = "the host twin" if host.is_exact else "0 .. the host twin"
        if bool(bad.any()):
            b = int(bad.nonzero()[0])
            allowed = "the host twin" if host.is_exact else "0 up to the host twin"
            raise GeometryError(
                f"I12: request {b} has {name} {int(value[b])} on the device; "
                f"allowed is {allowed}, {int(upper[b])}"
            )


def _check_rows(axis: RowAxis, requests: RequestAxis) -> None:
    request, position, kv_len = (t.cpu().long() for t in (axis.request, axis.position, axis.kv_len))
    is_live = request >= 0

    def fail(bad: Tensor, rule: str) -> None:
        _raise_first(
            bad,
            lambda row: (
                f"{rule}: row {row} of '{axis.label}' has request {int(request[row])}, position "
                f"{int(position[row])}, kv_len {int(kv_len[row])}"
            ),
        )

    fail((request < -1) | (request >= requests.num_requests), "I10: request out of range")
    fail(~is_live & ((position != 0) | (kv_len != 0)), "I3: a padding row has position or kv_len")
    fail(is_live & (kv_len != position + 1), "I1: kv_len of a live row is not position + 1")
    if requests.num_requests:
        total = requests.kv_len.cpu().long()
        first = total - requests.query_len.cpu().long()
        owner = request.clamp_min(0)
        outside = (position < first[owner]) | (position >= total[owner])
        fail(is_live & outside, "I12: position outside the tokens that its request computes")
    twin_request, twin_position = (torch.from_numpy(t) for t in axis.host_rows())
    if axis.is_exact:
        fail(request != twin_request, "I12: request differs from the host span")
        fail(is_live & (position != twin_position), "I12: position differs from the host span")
    else:
        fail(is_live & (request != twin_request), "I12: a live row is outside its host span")
        fail(is_live & (position > twin_position), "I12: position is above its host bound")
    key = torch.where(is_live, (request << 32) + position, -1 - torch.arange(len(request)))
    _, at, times = np.unique(key.numpy(), return_index=True, return_counts=True)
    repeated = torch.zeros(len(key), dtype=torch.bool)
    repeated[torch.from_numpy(at[times > 1])] = True
    fail(repeated, "I10: two rows are the same token")


def _check_table(table: PageTable, geometry: Geometry, num_pages: int | None) -> None:
    pages = table.pages.cpu().long()
    limit = num_pages if num_pages is not None else 2**31
    _raise_first(
        ((pages < 0) | (pages >= limit)).any(1),
        lambda b: f"I6: table '{table.group}', request {b}: a page outside 0..{limit - 1}",
    )
    requests = geometry.requests
    kv_len, query_len = requests.kv_len.cpu().long(), requests.query_len.cpu().long()
    entries = kv_len // table.tokens_per_entry
    if table.ownership is not None:
        entries = table.ownership.num_owned(entries)
    needed = -(-entries // table.page_size)
    column = torch.arange(pages.shape[1])
    must = column < needed[:, None]
    if table.window is not None:
        oldest = (kv_len - query_len - table.window + 1).clamp_min(0) // table.tokens_per_entry
        if table.ownership is not None:
            oldest = table.ownership.num_owned(oldest)
        must &= column >= (oldest // table.page_size)[:, None]
    missing = (must & (pages == 0)).any(1) | (needed > pages.shape[1])
    _raise_first(
        missing & (query_len > 0),
        lambda b: (
            f"I6: table '{table.group}': request {b} has kv_len {int(kv_len[b])} and a null page "
            f"among its first {int(needed[b])} pages: {pages[b].tolist()[:16]}"
        ),
    )


def _check_writes(table: PageTable, writes: WriteSlots) -> None:
    axis, slots = writes.axis, writes.slots.cpu()
    expected = table.write_slots(axis.request, axis.position).cpu()
    _raise_first(
        slots != expected,
        lambda row: (
            f"I8: group '{table.group}': row {row} of '{axis.label}' (request "
            f"{int(axis.request[row])}, position {int(axis.position[row])}) writes slot "
            f"{int(slots[row])}, its page table says {int(expected[row])}"
        ),
    )
    written = slots[slots >= 0]
    if len(np.unique(written.numpy())) < len(written):
        raise GeometryError(
            f"I6: group '{table.group}': two rows of '{axis.label}' write one slot; "
            f"slots {sorted(written.tolist())[:32]}"
        )


def _raise_first(bad: Tensor, message: Callable[[int], str]) -> None:
    if bool(bad.any()):
        raise GeometryError(message(int(bad.nonzero()[0])))
