"""The texts of the needle evaluation: filler, facts that can be asked, questions.

In:  a random.Random.
Out: `Fact`s with different keys and numbers; sentences of filler; wordings.
Rules: keys, without "the", are held out of training (held_out.py), and no wording here occurs in
training/ (a test compares). A key holds no digit. A fact's number has four to six digits, the
numbers in the filler at most three, so that no other number of a text is a fact's by chance.
Not here: how long a text gets and where its facts stand (needle_context.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gnomon.evaluate.held_out import is_held_out

STATEMENTS = (
    "As for {key}, its number is {value}.",
    "The number written next to {key} is {value}.",
    "Anyone who needs {key} has to know the number {value}.",
    "In the register, {key} is listed with the number {value}.",
    "They agreed that {key} would keep the number {value}.",
)
QUESTIONS = (
    "Which number was given for {key}?",
    "According to the text, what is the number of {key}?",
    "Please look up the number for {key}.",
    "What number does the text give for {key}?",
)
OPENINGS = ("", "This text holds some numbers.\n\n", "Please read this.\n\n")
SEPARATORS = (" ", "\n", "\n\n")


def _words(text: str) -> list[str]:
    return text.split()


_MATERIALS = _words("copper silver wooden woollen leather marble velvet bronze paper amber")
_MANNERS = _words("quiet narrow crooked hollow polished faded painted folded early northern")
_OBJECTS = _words(
    "lantern compass kettle ladder saddle drawer anchor mirror barrel harp shutter bridge cellar "
    "orchard ferry windmill chapel lighthouse meadow quarry"
)
_PEOPLE = _words("Agnes Bruno Celia Doris Edgar Flora Gustav Hilda Irene Jasper Kira Leo")
_PLACES = _words("harbour market station library village valley museum workshop garden school")
_SYLLABLES = _words(
    "ba be bo da del do fa fen gar hol ja jun ka kel lo lum ma mer mo na nor pel ra rin ro sa sel "
    "sil ta tam tor va vel vin wa wen yo za zel"
)
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"

_FILLER = (
    "{person} walked to the {place} before the rain began.",
    "The {manner} {object} belongs to the {place}.",
    "Nobody at the {place} remembered the {manner} {object}.",
    "{person} and {other} talked about the {material} {object} for a long time.",
    "In spring the {place} is open until late in the evening.",
    "The road to the {place} passes a {manner} {object}.",
    "{person} repaired the {object}, and {other} painted it.",
    "There were {few} people at the {place} when {person} came.",
    "The {place} was built in {months} months by {few} workers.",
    "{person} wrote a long letter about the {place}.",
    "It takes {few} minutes to walk from the {place} to the {object}.",
    "A {material} {object} stood under the window of the {place}.",
    "{other} likes the {place}, but {person} would rather stay at home.",
    "On the wall of the {place} hangs a picture of a {manner} {object}.",
    "{person} sold {few} tickets and kept the rest in a {material} box.",
    "When the wind turned, the boats went back to the {place}.",
    "Every child of the {place} has seen the {material} {object}.",
    "{person} asked whether the {object} was still {manner}.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that can be asked."""

    key: str
    value: str  # digits


def filler(dice: random.Random) -> str:
    """A sentence that states no fact."""
    person, other = dice.sample(_PEOPLE, 2)
    return dice.choice(_FILLER).format(
        person=person,
        other=other,
        place=dice.choice(_PLACES),
        object=dice.choice(_OBJECTS),
        manner=dice.choice(_MANNERS),
        material=dice.choice(_MATERIALS),
        few=dice.randint(3, 90),
        months=dice.randint(4, 300),
    )


def facts(dice: random.Random, count: int) -> list[Fact]:
    """Facts with different held-out keys and different numbers."""
    found: dict[str, str] = {}
    while len(found) < count:
        key = dice.choice(_KEY_KINDS)(dice)
        digits = dice.choice((4, 5, 5, 6))
        value = str(dice.randint(10 ** (digits - 1), 10**digits - 1))
        if is_held_out(key.removeprefix("the ")) and value not in found.values():
            found[key] = value
    return [Fact(key, value) for key, value in found.items()]


def statement(dice: random.Random, fact: Fact) -> str:
    """A sentence that states the fact."""
    return dice.choice(STATEMENTS).format(key=fact.key, value=fact.value)


def question(dice: random.Random, fact: Fact) -> str:
    """A question that the fact answers."""
    return dice.choice(QUESTIONS).format(key=fact.key)


def _described(dice: random.Random) -> str:
    quality = dice.choice(_MANNERS + _MATERIALS)
    return f"the {quality} {dice.choice(_OBJECTS)}"


def _invented(dice: random.Random) -> str:
    return "".join(dice.choices(_SYLLABLES, k=dice.choice((2, 3, 3)))).capitalize()


def _lettered(dice: random.Random) -> str:
    first, second = ("".join(dice.choices(_LETTERS, k=2)) for _ in range(2))
    return f"{first}-{second}"


_KEY_KINDS: tuple[Callable[[random.Random], str], ...] = (_described, _invented, _lettered)
