"""Traced text: behaves as the real text, and keeps whose each character is.

The users of these tests write in "<ab " and the template in ">yz\\n": whose a character is can be
read off it, so no second bookkeeping is needed to know what a result should be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import CheckpointError
from gnomon.text.encodings.traced import Traced, Tracer, plain
from gnomon.text.segments import Segment

USERS = "<ab"
TEMPLATES = ">yz"
TRACER = Tracer(["<ab>", "<a>", "yz", "<", "z<"], "test")

PIECES = st.lists(
    st.text(USERS + " ", max_size=5).map(TRACER.of_user) | st.text(TEMPLATES + "\n", max_size=4),
    max_size=6,
)
PARTS = st.text(USERS + TEMPLATES + " \n", min_size=1, max_size=2)


def check(value: Any, expected: Any) -> None:
    """Equal by the real text, and every character is its writer's."""
    if isinstance(expected, list | tuple):
        assert len(value) == len(expected)
        for one, other in zip(value, expected, strict=True):
            check(one, other)
        return
    assert plain(value) == expected
    if isinstance(value, str):
        buffer = "".join(value) if not isinstance(value, Traced) else str.__str__(value)
        assert not set(buffer) & set(USERS), "a user's character without its mark"
        marked = sum(0xD800 <= ord(character) < 0xE000 for character in buffer)
        assert marked == sum(character in USERS for character in plain(value))


OPERATIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda text, part, _: text.strip(),
    lambda text, part, _: text.strip(part),
    lambda text, part, _: text.lstrip(part),
    lambda text, part, _: text.rstrip("\n"),
    lambda text, part, _: text.split(part),
    lambda text, part, _: text.split(part, 1),
    lambda text, part, _: text.rsplit(part, 1),
    lambda text, part, _: text.split(),
    lambda text, part, _: text.split(None, 1),
    lambda text, part, _: text.rsplit(None, 1),
    lambda text, part, _: text.splitlines(),
    lambda text, part, _: text.splitlines(keepends=True),
    lambda text, part, _: text.partition(part),
    lambda text, part, _: text.rpartition(part),
    lambda text, part, _: text.removeprefix(part),
    lambda text, part, _: text.removesuffix(part),
    lambda text, part, size: text[:size],
    lambda text, part, size: text[size:],
    lambda text, part, _: text[::-1],
    lambda text, part, _: text[:1] * 3,
    lambda text, part, _: text + "y" + text,
    lambda text, part, _: "y" + text,
    lambda text, part, _: text.join(["z", "y"]),
    lambda text, part, _: text.replace(part, "zz"),
    lambda text, part, _: text.replace(part, "y", 1),
    lambda text, part, _: list(text),
    lambda text, part, _: str(text),
]
QUESTIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda text, part, _: part in text,
    lambda text, part, _: text.startswith(part),
    lambda text, part, _: text.startswith((part, "<")),
    lambda text, part, _: text.endswith(part),
    lambda text, part, _: text.find(part),
    lambda text, part, _: text.count(part),
    lambda text, part, _: text == part,
    lambda text, part, _: part == text,
    lambda text, part, _: text != part,
    lambda text, part, _: text < part,
    lambda text, part, _: part <= text,
    lambda text, part, _: text > part,
    lambda text, part, _: text >= part,
    lambda text, part, _: {text: 1}.get(part),
    lambda text, part, _: text in [part],
    lambda text, part, _: hash(text) == hash(part),
    lambda text, part, _: len(text),
    lambda text, part, _: bool(text),
    lambda text, part, _: text.isspace(),
]


@given(PIECES, PARTS, st.integers(-4, 9), st.booleans())
def test_operations_keep_whose_a_character_is(
    pieces: list[str], part: str, size: int, is_of_user: bool
) -> None:
    text = TRACER.joined(pieces)
    real = "".join(plain(piece) for piece in pieces)
    argument = TRACER.of_user(part) if is_of_user else part
    for operation in OPERATIONS:
        check(operation(text, argument, size), operation(real, part, size))


@given(PIECES, PARTS, st.integers(-4, 9))
def test_questions_are_answered_by_the_real_text(pieces: list[str], part: str, size: int) -> None:
    text = TRACER.joined(pieces)
    real = "".join(plain(piece) for piece in pieces)
    for question in QUESTIONS:
        assert question(text, part, size) == question(real, part, size)
        assert question(text, TRACER.of_user(part), size) == question(real, part, size)
        assert question(text, real, size) == question(real, real, size)


@given(PIECES)
def test_what_does_not_know_traced_text_keeps_the_marks(pieces: list[str]) -> None:
    text = TRACER.joined(pieces)
    as_format = "{}y"
    as_template = "%s>"
    for value in (f"{text}>", as_template % text, "".join([text, "y"]), as_format.format(text)):
        assert not set(value) & set(USERS)
        assert (
            TRACER.segments(value).build(starts_in_reasoning=False).text == plain(text) + value[-1]
        )


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_what_changes_letters_makes_them_the_users(text: str) -> None:
    tracer = Tracer(["<SS>", "ſſ"], "test")
    for name in ("upper", "lower", "title", "capitalize", "casefold", "swapcase"):
        changed = getattr(tracer.of_user(text), name)()
        assert plain(changed) == getattr(text, name)()
        assert tracer.segments(changed).build(starts_in_reasoning=False).segments in (
            (),
            (Segment("text", plain(changed)),),
        )
    assert plain(repr(tracer.of_user(text))) == repr(text)


@given(PIECES)
def test_control_tokens_are_those_of_the_template_alone(pieces: list[str]) -> None:
    """A plain search in a text where a user's characters are blanked out finds the same."""
    text = TRACER.joined(pieces)
    prompt = TRACER.segments(text).build(starts_in_reasoning=False)
    assert prompt.text == plain(text)
    blanked = "".join("." * len(piece) if isinstance(piece, Traced) else piece for piece in pieces)
    specials = [part.value for part in prompt.segments if part.kind == "special"]
    assert specials == ["yz"] * blanked.count("yz")


def test_the_longest_token_is_taken_first() -> None:
    tracer = Tracer(["a", "ab", "abc", "c"], "test")
    segments = tracer.segments("abcabxa").build(starts_in_reasoning=False).segments
    assert [part.value for part in segments] == ["abc", "ab", "x", "a"]


def test_without_control_tokens_all_is_text() -> None:
    prompt = Tracer([], "test").segments("a<b").build(starts_in_reasoning=False)
    assert prompt.segments == (Segment("text", "a<b"),)


def test_too_many_different_characters_are_refused() -> None:
    with pytest.raises(CheckpointError, match="3000 different characters"):
        Tracer([chr(0x4E00 + place) for place in range(3000)], "test")


def test_plain_goes_all_the_way_down() -> None:
    value = {"<a>": [1, ("<", None)], "b": {"c": "a"}}
    assert plain(TRACER.of_user(value)) == {"<a>": [1, ["<", None]], "b": {"c": "a"}}
