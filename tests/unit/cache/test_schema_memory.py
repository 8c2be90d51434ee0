"""Pages a request needs, and pages that fit a budget, against counting one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.layouts import PlainLayout
from gnomon.cache.budget import pages_for_budget
from gnomon.cache.rules import Banks, Checkpoint, Overwrite, Paged, Private, Ring, Window
from gnomon.cache.schema import CacheSchema, GroupSpec, PartSpec
from gnomon.errors import ConfigError


def part(name: str, columns: int = 4) -> PartSpec:
    return PartSpec(name, PlainLayout(torch.float32, columns), 0)


def pages_touched(first: int, last: int, page_size: int) -> int:
    """Pages that positions first .. last lie in, counted one by one."""
    return len({position // page_size for position in range(max(first, 0), last + 1)})


@given(
    window=st.integers(1, 40), ring=st.integers(0, 5), size=st.integers(1, 20),
    rows=st.integers(1, 30), past=st.integers(0, 150),
)  # fmt: skip
def test_a_window_holds_what_its_step_reads(
    window: int, ring: int, size: int, rows: int, past: int
) -> None:
    rollback = Ring(ring) if ring else Overwrite()
    group = GroupSpec("window", (part("w"),), size, 1, Window(window), rollback)
    need = pages_touched(past - window + 1 - ring, past + rows - 1, size)
    assert need <= group.pages_for_request(past + rows, rows)
    # Far from the start the count is reached by one of the page alignments, so it is not too big.
    far = range(1000, 1000 + size)
    needs = [pages_touched(p - window + 1 - ring, p + rows - 1, size) for p in far]
    assert max(needs) == group.pages_for_request(2000, rows)


@given(tokens=st.integers(0, 300), size=st.integers(1, 9), per_entry=st.integers(1, 8))
def test_pages_by_tokens(tokens: int, size: int, per_entry: int) -> None:
    paged = GroupSpec("p", (part("p"),), size, per_entry, Paged(3))
    assert paged.pages_for_request(tokens) == math.ceil((tokens + 3) / (size * per_entry))
    kept = GroupSpec("c", (part("c"),), size, per_entry, Checkpoint(per_entry))
    states = 1 + sum(1 for t in range(1, tokens + 1) if t % per_entry == 0)
    assert kept.pages_for_request(tokens) == math.ceil(states / size)
    own = GroupSpec("o", (part("o"),), size, 1, Private(5), Ring(2))
    assert own.pages_for_request(tokens) == math.ceil(7 / size)


@given(num_bytes=st.integers(0, 10**6), size=st.integers(1, 64))
def test_one_paged_group_takes_what_fits(num_bytes: int, size: int) -> None:
    schema = CacheSchema((GroupSpec("tokens", (part("a"), part("b", 3)), size),))
    page_bytes = size * (16 + 12)
    if num_bytes < 2 * page_bytes:
        with pytest.raises(ConfigError, match=f"too small.*at least {2 * page_bytes}"):
            pages_for_budget(schema, num_bytes)
    else:
        assert pages_for_budget(schema, num_bytes) == {"tokens": num_bytes // page_bytes}


def mixed_schema(banks: int) -> CacheSchema:
    return CacheSchema(
        (
            GroupSpec("tokens", (part("latent"), part("key", 2)), 16, 1, Paged(1)),
            GroupSpec("compressed", (part("entry"),), 2, 4),
            GroupSpec("window", (part("swa"),), 8, 1, Window(20), Ring(2)),
            GroupSpec("state", (part("kda", 50),), 1, 32, Checkpoint(32), Banks(banks)),
            GroupSpec("tail", (part("tail"),), 4, 1, Private(3, 4)),
        )
    )


@given(
    spare=st.integers(0, 200_000), requests=st.integers(1, 5), rows=st.integers(1, 60),
    banks=st.integers(2, 4),
)  # fmt: skip
def test_a_budget_is_kept_and_used_up(spare: int, requests: int, rows: int, banks: int) -> None:
    schema = mixed_schema(banks)
    with pytest.raises(ConfigError, match="too small") as refused:
        pages_for_budget(schema, 0, max_num_requests=requests, num_step_tokens=rows)
    least = int(str(refused.value).split("at least ")[1].split(".")[0])
    limits = {"max_num_requests": requests, "num_step_tokens": rows}
    with pytest.raises(ConfigError, match="too small"):
        pages_for_budget(schema, least - 1, **limits)
    pages = pages_for_budget(schema, least + spare, **limits)
    used = sum(schema.bytes_per_page(name) * count for name, count in pages.items())
    one_span = sum(
        schema.bytes_per_page(g.name) * 32 // g.tokens_per_page
        for g in schema.groups
        if g.name in ("tokens", "compressed", "state")
    )
    assert used <= least + spare < used + one_span


@given(
    step=st.lists(st.integers(1, 25), min_size=1, max_size=5), data=st.data(),
    spans=st.integers(1, 6),
)  # fmt: skip
def test_the_pages_suffice_for_every_request_at_once(
    step: list[int], data: st.DataObject, spans: int
) -> None:
    """Requests that share the token budget hold, in no group, more than its pages but page 0."""
    schema = mixed_schema(2)
    limits = {"max_num_requests": len(step), "num_step_tokens": sum(step)}
    with pytest.raises(ConfigError) as refused:
        pages_for_budget(schema, 0, **limits)
    least = int(str(refused.value).split("at least ")[1].split(".")[0])
    pages = pages_for_budget(schema, least + (spans - 1) * 10_000, **limits)
    places = [data.draw(st.integers(100, 140)) for _ in step]
    held = [pages_touched(p - 21, p + s - 1, 8) for p, s in zip(places, step, strict=True)]
    assert sum(held) <= pages["window"] - 1
    assert len(step) * schema.group("tail").pages_for_request(0) <= pages["tail"] - 1
    whole_spans = (pages["compressed"] - 1) // 4
    assert whole_spans >= 1
    assert pages["tokens"] - 1 >= 2 * whole_spans
    assert pages["state"] - 1 >= whole_spans + len(step)


def test_groups_per_request_alone() -> None:
    schema = CacheSchema((GroupSpec("tail", (part("tail"),), 4, 1, Private(3)),))
    assert pages_for_budget(schema, 10**6, max_num_requests=7) == {"tail": 8}
    with pytest.raises(ConfigError, match="7 running requests"):
        pages_for_budget(schema, 8 * 64 - 1, max_num_requests=7)
