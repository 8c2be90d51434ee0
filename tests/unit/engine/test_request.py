"""RequestState: when a request ends, and page ids that stay as they were handed out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.cache.prefix import Span
from gnomon.engine.request import RequestState, SpanTable
from gnomon.engine.sampling_params import SamplingParams
from tests.unit.engine.simulated_engine import EOS, make_request


def make_state(params: SamplingParams, num_prompt: int = 3, max_model_len: int = 100):
    request = make_request("a", [1] * num_prompt, params=params)
    state = RequestState(request, (0, 0.0, 0), max_model_len, SpanTable((1,)))
    state.open(SpanTable((1,)), 0)
    return state


def feed(state: RequestState, *token_ids: int) -> object:
    """What the last of these tokens means; the ones before must not end the request."""
    for token_id in token_ids[:-1]:
        assert state.append(token_id) is None
    return state.append(token_ids[-1])


@pytest.mark.parametrize(
    ("params", "token_ids", "ending"),
    [
        (SamplingParams(), (1, 1, EOS), ("stop", None)),
        (SamplingParams(ignore_eos=True), (EOS, EOS), None),
        (SamplingParams(stop_token_ids=[4]), (1, 4), ("stop", 4)),
        (SamplingParams(stop_token_ids=[EOS]), (EOS,), ("stop", None)),  # EOS comes first
        (SamplingParams(stop_token_ids=[EOS], ignore_eos=True), (EOS,), ("stop", EOS)),
        (SamplingParams(max_tokens=2), (1, 1), ("length", None)),
        (SamplingParams(max_tokens=2), (1, EOS), ("stop", None)),  # before length
        (SamplingParams(max_tokens=2, stop_token_ids=[4]), (1, 4), ("stop", 4)),
        (SamplingParams(min_tokens=2), (EOS, EOS, EOS), ("stop", None)),
        (SamplingParams(min_tokens=2, stop_token_ids=[4]), (4, 4, 4), ("stop", 4)),
        (SamplingParams(min_tokens=2, max_tokens=2), (EOS, EOS), ("length", None)),
        (SamplingParams(max_tokens=500), (1,) * 97, ("length", None)),  # the context is full
        (SamplingParams(max_tokens=None), (1,) * 97, ("length", None)),
        (SamplingParams(min_tokens=500), (EOS,) * 97, ("length", None)),
    ],
)
def test_endings(params: SamplingParams, token_ids: tuple[int, ...], ending: object) -> None:
    assert feed(make_state(params), *token_ids) == ending


def test_several_eos_ids_all_end_without_a_stop_reason() -> None:
    request = make_request("a", [1])
    request = type(request)(request_id="a", prompt_token_ids=[1], eos_token_ids=(3, 4))
    for eos in (3, 4):
        state = RequestState(request, (0, 0.0, 0), 10, SpanTable((1,)))
        state.open(SpanTable((1,)), 0)
        assert state.append(eos) == ("stop", None)


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(1, 3), (5, 7), (97, 99), (98, 99), (None, 99)]
)
def test_the_last_token_is_never_cached(max_tokens: int | None, expected: int) -> None:
    assert make_state(SamplingParams(max_tokens=max_tokens)).max_cached_tokens == expected


def test_the_prompt_that_came_in_is_not_changed() -> None:
    state = make_state(SamplingParams())
    state.append(5)
    assert state.tokens == [1, 1, 1, 5]
    assert state.request.prompt_token_ids == [1, 1, 1]


@given(
    steps=st.lists(st.one_of(st.integers(1, 5), st.floats(0, 1, exclude_max=True)), max_size=30),
    pages_per_span=st.sampled_from([(1,), (2,), (1, 3)]),
)
def test_page_ids_handed_out_never_change(
    steps: list[int | float], pages_per_span: tuple[int, ...]
) -> None:
    """An int appends so many spans; a float replaces the one at that share of the way."""
    table, next_page = SpanTable(pages_per_span), iter(range(1, 10_000))
    spans: list[Span] = []
    handed_out: list[tuple[tuple[np.ndarray, ...], list[list[int]]]] = []

    def new_span() -> Span:
        return Span(tuple(tuple(next(next_page) for _ in range(k)) for k in pages_per_span))

    for step in steps:
        if isinstance(step, int):
            added = [new_span() for _ in range(step)]
            table.extend(added)
            spans += added
        elif spans:
            place = int(step * len(spans))
            spans[place] = new_span()
            table.replace(place, spans[place])
        expected = [[p for s in spans for p in s.pages[g]] for g in range(len(pages_per_span))]
        handed_out.append((table.views, expected))
        assert table.spans == spans
    for views, expected in handed_out:
        assert [view.tolist() for view in views] == expected
        assert all(view.dtype == np.int32 for view in views)
