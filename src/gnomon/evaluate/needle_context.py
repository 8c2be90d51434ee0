"""Contexts of the needle evaluation: how long they get and where their facts stand.

In:  a number of characters, the depths of the facts to be asked, a random.Random.
Out: `Context`: a text, its facts, one question for each fact that is asked.
Depth 0 is before the first sentence of the filler, depth 1 behind the last; in between it is the
share of the filler's characters that stand before the fact, to the nearest sentence. The filler
mentions no key, so that a fact is the only place to find its number.
Not here: the words (needle_text.py), tokens (needle.py measures how long texts become).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gnomon.evaluate.needle_text import (
    OPENINGS,
    SEPARATORS,
    Fact,
    facts,
    filler,
    question,
    statement,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A fact that is asked, the depth where it stands, the question in words."""

    fact: Fact
    depth: float
    question: str


@dataclass(frozen=True, slots=True)
class Context:
    """A text with facts in it; `prompt` puts a question behind it."""

    text: str
    asked: tuple[Asked, ...]

    def prompt(self, asked: Asked) -> str:
        """The user's message."""
        return f"{self.text}\n\n{asked.question}"


def draw_context(
    dice: random.Random, num_chars: int, depths: Sequence[float], num_keys: int
) -> Context:
    """A context whose prompts have about `num_chars` characters.

    One fact stands at each depth and is asked; others, up to `num_keys` in all, stand anywhere.
    """
    drawn = facts(dice, max(num_keys, len(depths)))
    opening, separator = dice.choice(OPENINGS), dice.choice(SEPARATORS)
    asked = tuple(
        Asked(fact, depth, question(dice, fact))
        for fact, depth in zip(drawn[: len(depths)], depths, strict=True)
    )
    places = [*depths, *(dice.random() for _ in drawn[len(depths) :])]
    stated = [statement(dice, fact) + separator for fact in drawn]
    longest = max(len(one.question) for one in asked)
    room = num_chars - len(opening) - sum(map(len, stated)) - longest - len("\n\n")
    sentences = _filler(dice, room, separator, [fact.key for fact in drawn])
    text = opening + "".join(_mixed(sentences, stated, places))
    return Context(text.rstrip(), asked)


def _filler(dice: random.Random, room: int, separator: str, keys: Sequence[str]) -> list[str]:
    """As many sentences as there is room for, none of which mentions a key."""
    names = [key.removeprefix("the ") for key in keys]  # "a red lamp" would be a mention too
    sentences: list[str] = []
    while True:
        sentence = filler(dice) + separator
        if any(name in sentence for name in names):
            continue
        room -= len(sentence)
        if room < 0:
            return sentences
        sentences.append(sentence)


def _mixed(sentences: list[str], stated: list[str], places: Sequence[float]) -> list[str]:
    """The facts between the sentences, at their places; of two at one place the earlier first."""
    ends = [0, *accumulate(map(len, sentences))]
    before = [_nearest(ends, place * ends[-1]) for place in places]
    mixed: list[str] = []
    for number in range(len(sentences) + 1):
        mixed += [fact for fact, own in zip(stated, before, strict=True) if own == number]
        mixed += sentences[number : number + 1]
    return mixed


def _nearest(ends: Sequence[int], wanted: float) -> int:
    """The index of the boundary that is nearest to `wanted`."""
    place = min(bisect_left(ends, wanted), len(ends) - 1)
    if place and wanted - ends[place - 1] <= ends[place] - wanted:
        return place - 1
    return place
