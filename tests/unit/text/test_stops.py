"""Stop strings, against a search of the whole text that knows no automaton."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.text.stops import MAX_STOP_CHARS, MAX_STOP_STRINGS, StopMatcher, StopStep

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5)
CUTS = st.lists(st.integers(0, 14), max_size=5)


def expected_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop string is complete, and which: shortest text, then list order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def expected_held(text: str, stops: list[str]) -> int:
    """How long an end of the text could still become a stop string."""
    lengths = [
        size
        for size in range(1, len(text) + 1)
        if any(stop.startswith(text[-size:]) and len(stop) > size for stop in stops)
    ]
    return max(lengths, default=0)


def portions_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(LETTERS, STOPS, CUTS, st.booleans())
def test_the_text_is_cut_where_a_whole_search_cuts_it(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for portion in portions_of(text, cuts):
        step = matcher.feed(portion)
        shown += step.text
        if step.stop is not None:
            break
    else:
        assert expected_end(text, stops) is None
        assert len(text) - len(shown) == expected_held(text, stops)
        assert shown + matcher.finish() == text
        return
    found = expected_end(text, stops)
    assert found is not None
    end, stop = found
    assert step.stop == stop
    assert shown == (text[:end] if include else text[: end - len(stop)])


@given(LETTERS, LETTERS, STOPS)
def test_unarmed_text_passes_but_a_stop_string_may_begin_in_it(
    before: str, after: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    first = matcher.feed(before, is_armed=False)
    assert first.stop is None
    whole = before + after
    ends = [
        (end, stop)
        for end in range(len(before) + 1, len(whole) + 1)
        for stop in stops
        if whole[:end].endswith(stop)
    ]
    second = matcher.feed(after)
    assert second.stop == (ends[0][1] if ends else None)
    if not ends:
        assert first.text + second.text + matcher.finish() == whole


def test_no_stop_strings_and_empty_ones() -> None:
    assert StopMatcher([]).feed("abc") == StopStep("abc")
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopMatcher(["a", ""])


def test_ties_go_to_the_list_order() -> None:
    assert StopMatcher(["b", "ab"]).feed("xab") == StopStep("xa", "b")
    assert StopMatcher(["ab", "b"]).feed("xab") == StopStep("x", "ab")


def test_work_does_not_grow_with_the_number_of_stop_strings() -> None:
    """Count the steps of the automaton: at most two for each character, by construction of AC."""
    size = MAX_STOP_CHARS // MAX_STOP_STRINGS
    stops = [f"{'a' * (size - 5)}{number:05d}" for number in range(MAX_STOP_STRINGS)]
    matcher = StopMatcher(stops)
    looked_up = 0

    class Counted(dict[str, int]):
        def get(self, key: str, default: int | None = None) -> int | None:  # type: ignore[override]
            nonlocal looked_up
            looked_up += 1
            return super().get(key, default)

    for node in matcher._nodes:
        node.children = Counted(node.children)
    text = "aaa0" * 5000 + stops[-1]
    step = matcher.feed(text)
    assert step == StopStep("aaa0" * 5000, stops[-1])
    assert looked_up <= 2 * len(text)
