"""The cache schema: what it refuses, what its name space depends on, where prefixes may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, PlainLayout
from gnomon.cache.rules import (
    Banks,
    Checkpoint,
    Overwrite,
    Paged,
    Private,
    Ring,
    Rollback,
    Sharing,
    Window,
)
from gnomon.cache.schema import CacheSchema, GroupSpec, PartSpec
from gnomon.errors import ConfigError

LATENT = PartSpec("layers.0.latent", Fp8LatentLayout(512, 64), 0)
KEY = PartSpec("layers.0.index_key", Fp8IndexKeyLayout(128), 0)
STATE = PartSpec("layers.1.state", PlainLayout(torch.float32, 100), 1)
TOKENS = GroupSpec("tokens", (LATENT, KEY), page_size=64)


def state_group(sharing: Sharing, rollback: Rollback, page_size: int = 1) -> GroupSpec:
    interval = sharing.interval if isinstance(sharing, Checkpoint) else 1
    return GroupSpec("state", (STATE,), page_size, interval, sharing, rollback)


def test_bytes_of_a_page() -> None:
    """788 bytes a token: 656 of the latent and 132 of the index key."""
    schema = CacheSchema((TOKENS, state_group(Private(), Banks(4))))
    assert schema.bytes_per_page("tokens") == 64 * (656 + 132)
    assert schema.bytes_per_page("state") == 4 * 400
    assert TOKENS.tokens_per_page == 64
    assert state_group(Checkpoint(256), Overwrite(), page_size=2).tokens_per_page == 512


@pytest.mark.parametrize(
    ("sharing", "allowed"),
    [
        (Paged(1), [Overwrite()]),
        (Window(8), [Overwrite(), Ring(2)]),
        (Checkpoint(16), [Overwrite(), Banks(3)]),
        (Private(4), [Overwrite(), Ring(2), Banks(3)]),
    ],
)
def test_which_rollback_goes_with_which_sharing(sharing: Sharing, allowed: list[Rollback]) -> None:
    for rollback in (Overwrite(), Ring(2), Banks(3)):
        if rollback in allowed:
            assert state_group(sharing, rollback).rollback == rollback
        else:
            with pytest.raises(ConfigError, match=f"'state'.*{type(sharing).__name__} sharing"):
                state_group(sharing, rollback)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Paged(-1),
        lambda: Window(0),
        lambda: Checkpoint(0),
        lambda: Private(0),
        lambda: Private(1, -1),
        lambda: Ring(0),
        lambda: Banks(1),
    ],
)
def test_rules_out_of_range(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"must be at least .*; got"):
        make()


def test_groups_and_schemas_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="has no parts"):
        GroupSpec("tokens", (), 64)
    for page_size, tokens_per_entry in [(0, 1), (-4, 1), (64, 0)]:
        with pytest.raises(ConfigError, match="at least 1; got"):
            GroupSpec("tokens", (LATENT,), page_size, tokens_per_entry)
    with pytest.raises(ConfigError, match="an entry per 256 tokens; got tokens_per_entry 1"):
        GroupSpec("state", (STATE,), 1, 1, Checkpoint(256))
    with pytest.raises(ConfigError, match="has no groups"):
        CacheSchema(())
    with pytest.raises(ConfigError, match=r"group names must differ.*tokens"):
        CacheSchema((TOKENS, GroupSpec("tokens", (STATE,), 64)))
    with pytest.raises(ConfigError, match=r"part names must differ.*layers\.0\.latent"):
        CacheSchema((TOKENS, GroupSpec("more", (LATENT,), 64)))
    with pytest.raises(ConfigError, match="no cache group 'window'; this model has tokens"):
        CacheSchema((TOKENS,)).group("window")


def changed(group: GroupSpec, part: PartSpec | None = None, **fields: Any) -> CacheSchema:
    parts = group.parts if part is None else (part, *group.parts[1:])
    return CacheSchema((replace(group, parts=parts, **fields),))


def test_the_name_space_depends_on_all_that_the_bytes_depend_on() -> None:
    model = {"revision": "abc", "dtype": "bfloat16", "quantisation": "none"}
    base = CacheSchema((TOKENS,)).for_model(**model)
    others = [
        CacheSchema((TOKENS,)),
        base.for_model(**{**model, "revision": "abd"}),
        base.for_model(**{**model, "dtype": "float16"}),
        base.for_model(**{**model, "quantisation": "fp8"}),
        changed(TOKENS, replace(LATENT, layout=PlainLayout(torch.bfloat16, 576))),
        changed(TOKENS, replace(LATENT, layout=PlainLayout(torch.float16, 576))),
        changed(TOKENS, replace(LATENT, layout=Fp8LatentLayout(384, 130))),
        changed(TOKENS, replace(LATENT, layer=1)),
        changed(TOKENS, replace(LATENT, name="layers.1.latent")),
        changed(TOKENS, page_size=32),
        changed(TOKENS, page_size=32, tokens_per_entry=2),
        changed(TOKENS, sharing=Paged(1)),
        changed(TOKENS, name="others"),
        CacheSchema((TOKENS, state_group(Private(), Banks(2)))),
        CacheSchema((TOKENS, state_group(Private(), Banks(3)))),
    ]
    names = [base.namespace_id(), *(schema.namespace_id() for schema in others)]
    assert len(set(names)) == len(names)
    same = CacheSchema((GroupSpec("tokens", (LATENT, KEY), 64),)).for_model(**model)
    assert same.namespace_id() == base.namespace_id()


def test_reading_in_another_dtype_is_the_same_name_space() -> None:
    """The bytes are the same; the dtype of the model is stated by for_model."""
    wide = replace(LATENT, layout=Fp8LatentLayout(512, 64).computing_in(torch.float32))
    assert changed(TOKENS, wide).namespace_id() == CacheSchema((TOKENS,)).namespace_id()


COMPRESSED = GroupSpec("compressed", (STATE,), page_size=2, tokens_per_entry=128)


@pytest.mark.parametrize(
    ("groups", "step"),
    [
        ((TOKENS,), 64),
        ((TOKENS, COMPRESSED), 256),
        ((TOKENS, state_group(Window(128), Ring(2), page_size=48)), 192),
        ((TOKENS, state_group(Checkpoint(96), Overwrite())), 192),
        ((TOKENS, state_group(Private(4, empty_every=4), Ring(2))), 64),
        ((TOKENS, state_group(Private(4, empty_every=10), Ring(2))), 320),
        ((TOKENS, state_group(Private(4), Ring(2))), None),
    ],
)
def test_smallest_reusable_prefix_step(groups: tuple[GroupSpec, ...], step: int | None) -> None:
    assert CacheSchema(groups).prefix_step_tokens == step


@given(num_matching=st.integers(0, 1000), page_size=st.integers(1, 70), lookahead=st.integers(0, 5))
def test_reusable_tokens(num_matching: int, page_size: int, lookahead: int) -> None:
    """Whole pages, none of whose entries looked at a token beyond the match."""
    group = GroupSpec("tokens", (LATENT,), page_size, sharing=Paged(lookahead))
    reusable = CacheSchema((group,)).reusable_tokens(num_matching)
    fitting = [
        pages * page_size
        for pages in range(num_matching + 1)
        if pages == 0 or pages * page_size + lookahead <= num_matching
    ]
    assert reusable == max(fitting)


def test_no_tokens_are_reusable_where_a_private_group_never_empties() -> None:
    schema = CacheSchema((TOKENS, state_group(Private(4), Ring(2))))
    assert schema.reusable_tokens(10_000) == 0
