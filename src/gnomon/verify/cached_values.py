"""What a run writes into a cache that rounds: kept, compared, and put in place of another run's.

A cache narrower than the arithmetic rounds, and a value whose last bits differ may be rounded to
the next code: a discrete choice, like a key list, that no two ways of summing agree on. So it is
treated as one. The decoded values that one run wrote (latents, index keys) or scored with (index
queries, which index_k layouts round as they do keys) are kept by request and position. The run that
is compared with it gets them in the place of its own, so that all that follows has to agree to the
last few bits; and its own codes are compared with them by a rule of their own (`code_fault`): each
at most one step apart, and no more of them than values off by the tolerance would flip.
In:  operators to watch; who is in the step (begin_step, by way of NamingTap).
Out: CachedValues by part and request name. Works with every provider: what was written is read back
     through the layout.
Not here: which runs are compared (law.py), differences of logits and choices (margins.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnomon.attention.geometry import RowAxis, RowTensor, WriteSlots
from gnomon.attention.indices import KeySet
from gnomon.attention.layouts.base import KVLayout, PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.operators import Kernel, Operators
from gnomon.attention.ops.values import IndexTransform, RopeRows, Selection
from gnomon.errors import GnomonError, NumericsError

if TYPE_CHECKING:
    from gnomon.attention.taps import SelectionTap

LATENTS, INDEX_KEYS, INDEX_QUERIES = "latents", "index keys", "index queries"
Part = tuple[str, int]  # (one of these, layer)


@dataclass(frozen=True, slots=True, eq=False)
class PartValues:
    """Decoded values [n, ..., D] of one part of one request; row p is that of position p.

    NaN where nothing was seen. `layout` has rounded them.
    """

    layout: KVLayout
    values: Tensor

    def until(self, num_rows: int) -> PartValues:
        """The first positions only."""
        return PartValues(self.layout, self.values[:num_rows])


CachedValues = Mapping[Part, PartValues]
Replayed = Mapping[str, CachedValues]  # by request name


def rounds(layout: KVLayout, dtype: torch.dtype) -> bool:
    """Whether `layout` keeps less of a value than a model that computes in `dtype` knows."""
    if not isinstance(layout, PlainLayout):
        return True
    return torch.finfo(layout.stored_dtype).eps > torch.finfo(dtype).eps


class CacheTape:
    """Keeps what is written in a run, and says what to write instead."""

    def __init__(self) -> None:
        self.restart({})

    def restart(self, replayed: Replayed) -> None:
        """Begin a run that gets these values in the place of its own, where there are any."""
        self._replayed = replayed
        self._names: tuple[str, ...] = ()
        self._seen: dict[tuple[str, Part], tuple[KVLayout, list[tuple[Tensor, Tensor]]]] = {}

    def begin_step(self, request_ids: Sequence[str]) -> None:
        """The names of the requests of the step that begins."""
        self._names = tuple(request_ids)

    def pass_on(self, part: Part, axis: RowAxis, layout: KVLayout, values: Tensor) -> Tensor:
        """Keep values [R, ..., D] of the axis' live rows; what has to stand in their place."""
        if not self._names:
            raise GnomonError(f"{part[0]} were written before a step told its requests")
        request, position = axis.host_rows()
        here = values.detach().cpu()  # one wait for a device, not one for each request
        passed: Tensor | None = None
        for number in sorted(set(request[request >= 0].tolist())):
            rows = torch.from_numpy((request == number).nonzero()[0])
            places = torch.from_numpy(position[request == number]).long()
            name = self._names[number]
            kept = self._seen.setdefault((name, part), (layout, []))[1]
            kept.append((places, here[rows].float()))
            given = self._replayed.get(name, {}).get(part)
            if given is not None:
                passed = here.clone() if passed is None else passed
                _replace(passed, rows, places, given.values)
        return values if passed is None else passed.to(values.device)

    def of(self, name: str, num_rows: int) -> dict[Part, PartValues]:
        """All parts of a request, over its first positions."""
        return {
            part: PartValues(layout, _by_position(kept, num_rows))
            for (owner, part), (layout, kept) in self._seen.items()
            if owner == name
        }


class TapeOfRanks(CacheTape):
    """The tapes of several ranks as one. All ranks write the same, so what they wrote is equal."""

    def __init__(self, tapes: Sequence[CacheTape]) -> None:
        self._tapes = tuple(tapes)
        super().__init__()

    def restart(self, replayed: Replayed) -> None:
        """All ranks begin a run."""
        for tape in self._tapes:
            tape.restart(replayed)

    def begin_step(self, request_ids: Sequence[str]) -> None:
        """The names of the requests of the step that begins, on every rank."""
        for tape in self._tapes:
            tape.begin_step(request_ids)

    def of(self, name: str, num_rows: int) -> dict[Part, PartValues]:
        """Of all ranks. Raises NumericsError where two of them hold different values."""
        found: dict[Part, PartValues] = {}
        for rank, tape in enumerate(self._tapes):
            for part, own in tape.of(name, num_rows).items():
                held = found.setdefault(part, own).values
                clash = (held != own.values) & ~held.isnan() & ~own.values.isnan()
                if bool(clash.any()):
                    place = int(clash.flatten(1).any(1).nonzero()[0, 0])
                    raise NumericsError(
                        f"request {name!r}: rank {rank} and an earlier one hold different "
                        f"{part[0]} at position {place}, layer {part[1]}"
                    )
                found[part] = PartValues(own.layout, held.where(~held.isnan(), own.values))
        return found


def _replace(values: Tensor, rows: Tensor, places: Tensor, given: Tensor) -> None:
    """Put the given values, of `places`, at `rows`; a row for which none are given stays."""
    known = places < len(given)
    chosen = given[places[known]]
    is_seen = ~chosen.flatten(1).isnan().any(1)
    values[rows[known][is_seen]] = chosen[is_seen].to(values)


def _by_position(kept: Sequence[tuple[Tensor, Tensor]], num_rows: int) -> Tensor:
    found = torch.full((num_rows, *kept[0][1].shape[1:]), torch.nan)
    for places, values in kept:
        is_within = places < num_rows
        found[places[is_within]] = values[is_within]
    return found


class TapedOperators(Operators):
    """Operators whose writes into the cache, and whose index queries, pass over a tape."""

    def __init__(self, kernels: Mapping[str, Kernel], tape: CacheTape) -> None:
        super().__init__(kernels)
        self._tape = tape
        self._layer = 0

    def begin_layer(self, layer: int) -> None:
        """The calls from here on are of this layer."""
        self._layer = layer

    def latent_write(
        self,
        kv_raw: RowTensor,
        norm_weight: Tensor,
        eps: float,
        rope: RopeRows,
        pool: PagedPool,
        writes: WriteSlots,
    ) -> None:
        """Write, then put the tape's values in the place of what was written."""
        super().latent_write(kv_raw, norm_weight, eps, rope, pool, writes)
        self._rewrite(LATENTS, pool, writes)

    def index_prepare(
        self,
        q_raw: RowTensor,
        k_raw: RowTensor,
        transform: IndexTransform,
        rope: tuple[RopeRows, RopeRows],
        pool: PagedPool,
        writes: WriteSlots,
    ) -> RowTensor:
        """Prepare, then put the tape's keys and queries in the place of both."""
        query = super().index_prepare(q_raw, k_raw, transform, rope, pool, writes)
        self._rewrite(INDEX_KEYS, pool, writes)
        if not pool.layout.rounds_queries:
            return query
        part = (INDEX_QUERIES, self._layer)
        return RowTensor(query.axis, self._tape.pass_on(part, query.axis, pool.layout, query.data))

    def _rewrite(self, kind: str, pool: PagedPool, writes: WriteSlots) -> None:
        part, slots = (kind, self._layer), writes.slots
        written = pool.layout.gather(pool, slots)
        wanted = self._tape.pass_on(part, writes.axis, pool.layout, written)
        if wanted is not written:
            pool.layout.write(pool, slots, wanted)


class NamingTap:
    """A SelectionTap that tells a tape, too, whose step begins."""

    def __init__(self, inner: SelectionTap, tape: CacheTape) -> None:
        self._inner, self._tape = inner, tape
        self.wants_margin = inner.wants_margin

    def begin_step(self, rows: RowAxis, request_ids: Sequence[str]) -> None:
        """A step begins."""
        self._tape.begin_step(request_ids)
        self._inner.begin_step(rows, request_ids)

    def index(self, layer: int, selection: Selection) -> KeySet:
        """As the inner tap chooses."""
        return self._inner.index(layer, selection)

    def experts(self, layer: int, expert_ids: Tensor, margin: Tensor) -> Tensor:
        """As the inner tap chooses."""
        return self._inner.experts(layer, expert_ids, margin)


def code_fault(
    expected: PartValues, found: PartValues, mask: Tensor, tolerance: float
) -> tuple[int, str] | None:
    """(position, what is wrong) with the codes of the rows of `mask` [n], or None.

    A code may be one step off: then both values stood at the edge between two steps. Values may be
    off by `reach`, the tolerance at the part's standard deviation, and so may be two codes of
    tiny numbers in a format of floats, whose steps are finer than that. If each value were off
    by that much, a code would flip with the probability reach / step: the sum of that is how many
    are expected at most, and four standard deviations more are allowed.
    """
    num_rows = min(len(mask), len(expected.values), len(found.values))
    seen = mask[:num_rows].clone()
    for side in (expected, found):
        seen &= ~side.values[:num_rows].flatten(1).isnan().any(1)
    rows = seen.nonzero()[:, 0]
    if not len(rows):
        return None
    ours, theirs = (side.values[rows].double() for side in (expected, found))
    step = sum(expected.layout.round_trip_bound(values.float()) for values in (ours, theirs))
    assert isinstance(step, Tensor)
    reach = tolerance * max(1.0, float(ours.std(correction=0)))
    off = (ours - theirs).abs()
    is_far = (off > step * 1.01 + reach).flatten(1).any(1)
    if bool(is_far.any()):
        place = int(is_far.nonzero()[0, 0])
        share = float((off / (step + reach))[place].max())
        return int(rows[place]), f"a code is {share:.3g} steps off"
    likely = float((reach / step).clamp(max=1.0).sum())
    num_flips, allowed = int((off > 0).sum()), likely + 4.0 * math.sqrt(likely) + 4.0
    if num_flips <= allowed:
        return None
    first = int((off > 0).flatten(1).any(1).nonzero()[0, 0])
    return int(
        rows[first]
    ), f"{num_flips} of {off.numel()} codes are one step off, not {allowed:.0f}"
