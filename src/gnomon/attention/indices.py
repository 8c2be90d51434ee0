"""Key sets: what each row attends, as explicit index lists or as ranges.

In:  ids and counts on a RowAxis, made by an operator that selects (top-k) or by a rule (causal).
Out: ``KeySet`` of ``ListSegment`` and ``RangeSegment``; ``to_slots`` is the one way from entry
     numbers to slots of a pool.
Not here: selection (ops), attention, and who owns a page.

A list is always fully written: row r has ``count[r]`` valid ids first, ascending, then -1.
Top-k's tie rule: higher score first, ties to the LOWER position; NaN counts as -inf and raises
the row's flag. For a part that stores one entry for m tokens, POSITION means entry number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis
from gnomon.attention.geometry import PageTable
from gnomon.attention.ownership import KeyOwnership
from gnomon.errors import GeometryError

__all__ = [
    "KeySet",
    "ListSegment",
    "RangeSegment",
    "Segment",
    "Space",
    "causal_list",
    "causal_range",
    "owned_list",
    "to_slots",
]


class Space(StrEnum):
    """What the numbers of an index list count."""

    POSITION = "position"  # entries of the row's own request, 0-based
    SLOT = "slot"  # entries of a pool: page * page_size + offset
    WORKSPACE = "workspace"  # rows of a gathered scratch buffer


@dataclass(frozen=True, slots=True, eq=False)
class HeldSlots:
    """``slots`` [R, W], int32 or int64, of the POSITION list ``ids`` through the table ``pages``.

    They serve these very tensors and no equal ones: a list that was changed has none.
    """

    ids: Tensor
    pages: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ListSegment:
    """``ids[R, W]`` (int32 or int64), of which the first ``count[R]`` (int32) are valid.

    ``held``: the list's slots, if whoever made it knew them; ``to_slots`` then looks up nothing.
    """

    part: str
    space: Space
    ids: Tensor
    count: Tensor
    held: HeldSlots | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.dtype not in (torch.int32, torch.int64):
            raise GeometryError(
                f"index list of '{self.part}': ids are {self.ids.dtype} {tuple(self.ids.shape)}; "
                "int32 or int64 of [rows, width] is needed"
            )
        _require_count(self.part, "count", self.count, self.ids.shape[0])

    @property
    def width(self) -> int:
        return int(self.ids.shape[1])

    @property
    def num_rows(self) -> int:
        return int(self.ids.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class RangeSegment:
    """Entries ``start[r] .. start[r] + count[r] - 1`` of the row's request, int32; never listed."""

    part: str
    start: Tensor
    count: Tensor

    def __post_init__(self) -> None:
        _require_count(self.part, "count", self.count, self.count.shape[0])
        _require_count(self.part, "start", self.start, self.count.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.count.shape[0])


Segment = ListSegment | RangeSegment


@dataclass(frozen=True, slots=True, eq=False)
class KeySet:
    """The keys of every row of ``axis``: segments in order of summation, and an optional sink.

    ``sink``: a logit per head [H] that takes softmax weight and adds no value; None for none.
    """

    axis: RowAxis
    segments: tuple[Segment, ...]
    sink: Tensor | None = None

    def __post_init__(self) -> None:
        for segment in self.segments:
            if segment.num_rows != self.axis.num_rows:
                raise GeometryError(
                    f"segment of '{segment.part}' has {segment.num_rows} rows, its row axis "
                    f"'{self.axis.label}' has {self.axis.num_rows}"
                )

    def check(self, tokens_per_entry: Mapping[str, int] | None = None) -> None:
        """Read the ids (this syncs) and raise GeometryError at the first row that breaks a rule.

        Rules: 0 <= count <= width; valid ids ascend strictly (POSITION) or differ (others), and
        -1 follows; POSITION ids and ranges stay below the entries that the row may see; padding
        rows have count 0. ``tokens_per_entry`` by part, 1 where it is not named.
        """
        for segment in self.segments:
            ratio = (tokens_per_entry or {}).get(segment.part, 1)
            visible = self.axis.kv_len.to(torch.int64) // ratio
            if isinstance(segment, ListSegment):
                _check_list(segment, self.axis, visible)
            else:
                start, end = segment.start.long(), segment.start.long() + segment.count.long()
                bad = (segment.count < 0) | (start < 0) | (end > visible)
                _raise_at(bad, segment, self.axis, "a range leaves the entries that its row sees")


def _check_list(segment: ListSegment, axis: RowAxis, visible: Tensor) -> None:
    ids, count = segment.ids.long(), segment.count.long()
    _raise_at((count < 0) | (count > segment.width), segment, axis, "count outside 0..width")
    _raise_at((count > 0) & ~axis.is_live(), segment, axis, "a padding row has keys")
    is_valid = torch.arange(segment.width, device=ids.device) < count[:, None]
    _raise_at((~is_valid & (ids != -1)).any(1), segment, axis, "ids after count are not -1")
    _raise_at((is_valid & (ids < 0)).any(1), segment, axis, "a valid id is negative")
    if segment.space is Space.POSITION:
        too_far = is_valid & (ids >= visible[:, None])
        _raise_at(too_far.any(1), segment, axis, "an id is at or past the entries the row sees")
        ordered = ids
    else:
        ordered = torch.where(is_valid, ids, torch.iinfo(torch.int64).max).sort(dim=1).values
    falls = is_valid[:, 1:] & (ordered[:, 1:] <= ordered[:, :-1])
    _raise_at(falls.any(1), segment, axis, "ids repeat or do not ascend")


def _raise_at(bad: Tensor, segment: Segment, axis: RowAxis, rule: str) -> None:
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0])
    shown = f"count {int(segment.count[row])}"
    if isinstance(segment, ListSegment):
        shown += f", ids {segment.ids[row, :8].tolist()}{'...' if segment.width > 8 else ''}"
    raise GeometryError(
        f"key set of '{segment.part}' on '{axis.label}': {rule}: row {row} (request "
        f"{int(axis.request[row])}, position {int(axis.position[row])}, kv_len "
        f"{int(axis.kv_len[row])}) has {shown}"
    )


def _require_count(part: str, name: str, tensor: Tensor, num_rows: int) -> None:
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != (num_rows,):
        raise GeometryError(
            f"segment of '{part}': {name} is {tensor.dtype} {tuple(tensor.shape)}; "
            f"int32 ({num_rows},) is needed"
        )


def causal_range(axis: RowAxis, part: str, tokens_per_entry: int = 1) -> RangeSegment:
    """Every entry that a row may see: start 0, count kv_len // tokens_per_entry."""
    return RangeSegment(part, torch.zeros_like(axis.kv_len), axis.kv_len // tokens_per_entry)


def causal_list(axis: RowAxis, part: str, width: int) -> ListSegment:
    """Ids 0..count-1, count = min(kv_len, width): the selection of rows with kv_len <= width.

    Rows with a longer kv_len get their first ``width`` positions, to be overwritten by top-k.
    """
    count = axis.kv_len.clamp_max(width)
    ids = torch.arange(width, dtype=torch.int32, device=axis.device)
    return ListSegment(part, Space.POSITION, ids.masked_fill(ids >= count[:, None], -1), count)


def owned_list(segment: ListSegment, ownership: KeyOwnership) -> ListSegment:
    """Only the ids that this rank holds (POSITION space), packed first, in their order.

    Over all ranks the lists are disjoint, and together they are ``segment``.
    """
    if segment.space is not Space.POSITION:
        raise GeometryError(
            f"owned_list of '{segment.part}': ownership is by position, the list is in "
            f"{segment.space} space"
        )
    is_owned = (segment.ids >= 0) & (ownership.owner(segment.ids) == ownership.rank)
    order = torch.argsort(~is_owned, dim=1, stable=True)
    ids = segment.ids.masked_fill(~is_owned, -1).gather(1, order)
    return replace(segment, ids=ids, count=is_owned.sum(1, dtype=torch.int32), held=None)


def to_slots(
    segment: ListSegment, axis: RowAxis, table: PageTable, *, validate: bool | None = None
) -> ListSegment:
    """The same list in SLOT space through the page table of the part's group.

    Its ids are int64, or int32 where the selection made the slots beside the list.

    An id that the table does not hold (use ``owned_list`` first where ranks own stripes) raises
    GeometryError if ``validate``; by default that is so on the CPU, and on a device (where it
    would sync) the id becomes -1, never a foreign slot. Slots that the list holds are taken as
    they are unless ``validate`` is True.
    """
    if segment.space is not Space.POSITION:
        raise GeometryError(
            f"to_slots of '{segment.part}': the list is in {segment.space} space; "
            f"only {Space.POSITION} lists convert"
        )
    if segment.num_rows != axis.num_rows:
        raise GeometryError(
            f"to_slots of '{segment.part}': {segment.num_rows} rows of ids, row axis "
            f"'{axis.label}' has {axis.num_rows}"
        )
    if not validate and _holds(segment, table):
        assert segment.held is not None
        return ListSegment(segment.part, Space.SLOT, segment.held.slots, segment.count)
    quick = _slots_of_held(segment.ids, axis, table)
    if quick is not None:
        return ListSegment(segment.part, Space.SLOT, quick, segment.count)
    slots = table.entry_slots(axis.request[:, None], segment.ids)
    if validate or (validate is None and slots.device.type == "cpu"):
        lost = (slots < 0) & (segment.ids >= 0)
        _raise_at(lost.any(1), segment, axis, f"an id has no page in table '{table.group}'")
    return replace(segment, space=Space.SLOT, ids=slots, held=None)


def _holds(segment: ListSegment, table: PageTable) -> bool:
    """Whether the list's own slots are those of these ids through this table."""
    held = segment.held
    if held is None or table.ownership is not None:
        return False
    return held.ids is segment.ids and held.pages is table.pages


def _slots_of_held(ids: Tensor, axis: RowAxis, table: PageTable) -> Tensor | None:
    """``entry_slots`` in few calls, for lists on the CPU whose every id has its page; else None."""
    num_pages, size = table.pages.shape[1], table.page_size
    is_plain = table.ownership is None and axis.is_exact and axis.num_live == axis.num_rows
    if ids.device.type != "cpu" or not is_plain or ids.numel() == 0:
        return None
    low, high = (int(bound) for bound in ids.aminmax())
    if high >= num_pages * size:
        return None
    entry = ids.clamp_min(0) if low < 0 else ids
    column = torch.div(entry, size, rounding_mode="floor")
    page = table.pages.take((axis.request[:, None] * num_pages + column).long())
    slots = torch.add(entry, (page - column).long(), alpha=size)
    if low < 0:
        slots.masked_fill_(ids < 0, -1)
        is_held = not bool(((slots < size) & (ids >= 0)).any())
    else:
        is_held = int(slots.min()) >= size  # below lies the null page
    return slots if is_held else None
