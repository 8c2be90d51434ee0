"""Key–value recall: facts scattered through a text, and questions about them.

In:  a random.Random, a length in tokens, a family's chat format.
Out: an episode of about that length. Facts of many wordings stand in filler (Python's
     documentation, stories, logs) or close together; questions come at the end or in between,
     many in one episode, because each answer teaches.
`needle` is the form that is measured: filler, a few facts of held-out keys and wordings, one
question at the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.data.english import sentence
from training.data.writing import BOS, EOS, Chat, Episode, Family, Piece, chat
from training.data.words import COLOURS, digits, keys

NOUNS = (
    "number", "number", "number", "code", "secret number", "magic number", "value", "pin",
    "access code", "phone number", "ticket number", "score", "price", "count", "password",
    "serial number", "total", "locker number", "room number", "id",
)  # fmt: skip
STATEMENTS = (
    "The {noun} for {key} is {value}.",
    "The {noun} of {key} is {value}.",
    "The {noun} that belongs to {key} is {value}.",
    "For {key}, the {noun} is {value}.",
    "{key} has the {noun} {value}.",
    "Remember that the {noun} for {key} is {value}.",
    "Note: the {noun} of {key} is {value}.",
    "Please keep in mind that {key} stands for {value}.",
    "{key}: {value}",
    "{key} = {value}",
    "{key} -> {value}",
    "- {key}: {value}",
    "{key} is {value}.",
    "{key} | {noun} | {value}",
    "{key} goes with {value}.",
    "We gave {key} the {noun} {value}.",
    "The {noun} assigned to {key} was {value}.",
    '"{key}": {value},',
    "If you look for {key}, you will find the {noun} {value}.",
    "On the card of {key} it says {value}.",
)
QUESTIONS = (
    "What is the {noun} for {key}?",
    "What is the {noun} for {key}?",
    "What is the {noun} of {key}?",
    "Which {noun} belongs to {key}?",
    "Tell me the {noun} for {key}.",
    "Look at the text above. What is the {noun} for {key}?",
    "What number goes with {key}?",
    "Find the {noun} of {key} and answer with the number only.",
    "I forgot the {noun} for {key}. What was it?",
    "{key}?",
    "And {key}?",
    "{noun} of {key}?",
    "Please give me the {noun} that belongs to {key}.",
    "What did it say about {key}?",
    "Answer with a number: what is the {noun} for {key}?",
    "Can you find {key} in the text and tell me its {noun}?",
)
HELD_OUT_NOUNS = ("number", "badge number", "key", "figure")
HELD_OUT_STATEMENTS = (
    "Whoever asks about {key} should hear the {noun} {value}.",
    "Keep this to yourself: the {noun} for {key} is {value}.",
    "It is well known that {key} carries the {noun} {value}.",
    "According to the list, the {noun} for {key} is {value}.",
)
HELD_OUT_QUESTIONS = (
    "What is the number for {key}?",
    "From the text: which {noun} does {key} have?",
    "What was the {noun} for {key} again?",
    "Do you know the {noun} of {key}?",
)
INTRODUCTIONS = (
    "", "", "Read this text.\n\n", "Here are some notes.\n", "Text:\n", "I will ask about this.\n",
    "The following list may help.\n\n", "Memorise these facts.\n",
)  # fmt: skip
TEXT = 0.05  # weight of filler and wording


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that can be asked. `noun` None: the value is a word, not a number."""

    key: str
    noun: str
    value: str


def facts(dice: random.Random, count: int, held_out: bool = False) -> list[Fact]:
    """Facts of different keys, sharing few nouns."""
    pool = HELD_OUT_NOUNS if held_out else NOUNS
    nouns = dice.sample(pool, dice.randint(1, 3))
    if not held_out and dice.random() < 0.08:
        return [Fact(key, "colour", dice.choice(COLOURS)) for key in keys(dice, count, False)]
    length = dice.choice((None, None, None, 4, 5, 6))
    return [
        Fact(key, dice.choice(nouns), digits(dice, length)) for key in keys(dice, count, held_out)
    ]


def statement(template: str, fact: Fact, value_weight: float) -> list[Piece]:
    """The pieces of a sentence that states a fact."""
    head, tail = template.split("{value}")
    fill = {"noun": fact.noun, "key": fact.key}
    return [
        (head.format(**fill), TEXT),
        (fact.value, value_weight),
        (tail.format(**fill), TEXT),
    ]


def question(dice: random.Random, fact: Fact, held_out: bool = False) -> str:
    """A question about a fact, by its own noun or as a plain number."""
    template = dice.choice(HELD_OUT_QUESTIONS if held_out else QUESTIONS)
    if fact.noun == "colour":
        template = dice.choice(("What is the {noun} of {key}?", "Which {noun} has {key}?"))
    noun = fact.noun if dice.random() < 0.7 or fact.noun == "colour" else "number"
    return template.format(noun=noun, key=fact.key)


class _Stack:
    """Writes facts and filler, with one separator and few wordings an episode."""

    def __init__(self, dice: random.Random, density: float, held_out: bool = False) -> None:
        self._dice, self._density = dice, density
        pool = HELD_OUT_STATEMENTS if held_out else STATEMENTS
        self._templates = dice.sample(pool, min(len(pool), dice.choice((1, 1, 2, 3, 6))))
        self._separator = dice.choice((" ", "\n", "\n", "\n\n"))
        self._filler = dice.choice(("docs", "docs", "story", "log", "mixed"))
        if all(not t.endswith(".") for t in self._templates):
            self._separator = "\n"

    def pieces(self, pending: list[Fact], budget: float) -> tuple[list[Piece], list[Fact]]:
        """About `budget` tokens; the facts that they state, taken from `pending`."""
        out: list[Piece] = []
        stated: list[Fact] = []
        size = 0.0
        while size < budget:
            if pending and self._dice.random() < self._density:
                fact = pending.pop()
                out += statement(self._dice.choice(self._templates), fact, 0.0)
                stated.append(fact)
                size += 8 + len(fact.key) / 3 + len(fact.value)
            else:
                text = sentence(self._dice, self._filler)
                out.append((text, TEXT))
                size += len(text) / 3.3 + 1
            out.append((self._separator, TEXT))
        return out, stated


def _thoughts(fact: Fact) -> str:
    return f"The text says: the {fact.noun} for {fact.key} is {fact.value}."


def recall(dice: random.Random, length: int, family: Family) -> Episode:
    """An episode of about `length` tokens. It may be shorter where all facts were asked for."""
    style = dice.choice(("big", "big", "gradual", "gradual", "raw"))
    if style == "raw":
        return _raw(dice, length)
    talk = chat(family, dice.choice(("", "", "You are a helpful assistant.")))
    dense = dice.random() < 0.75
    stack = _Stack(dice, dice.uniform(0.4, 1.0) if dense else dice.uniform(0.01, 0.15))
    pending = facts(dice, max(2, length // 14) if dense else dice.randint(1, 8))
    known: list[Fact] = []
    opening: list[Piece] = [(dice.choice(INTRODUCTIONS), TEXT)]
    budget = length * (dice.uniform(0.45, 0.85) if style == "big" else dice.uniform(0.1, 0.4))
    more, stated = stack.pieces(pending, budget)
    known += stated
    asked: dict[str, int] = {}
    while True:
        if not known or (style == "gradual" and dice.random() < 0.25):
            extra, stated = stack.pieces(pending or facts(dice, 2), length * 0.04 + 10)
            more, known = more + extra, known + stated
            if not known:
                continue
        fact = dice.choice(known)
        asked[fact.key] = asked.get(fact.key, 0) + 1
        talk.user([*opening, *more, (question(dice, fact), 0.0)])
        opening, more = [], []
        thinks = dice.random() < 0.06
        talk.answer(fact.value, _thoughts(fact) if thinks else None)
        is_long = talk.episode.num_characters > length * 3.6
        if is_long or asked[fact.key] > 3 or len(asked) > length // 24 + 4:
            return talk.episode


def _raw(dice: random.Random, length: int) -> Episode:
    """A text that states its facts more than once: the second time they can be known."""
    episode = Episode()
    episode.mark(BOS)
    stack = _Stack(dice, dice.uniform(0.3, 1.0))
    known: list[Fact] = []
    pending = facts(dice, max(2, length // 30))
    templates = dice.sample(STATEMENTS[:14], 3)
    while episode.num_characters < length * 3.2:
        pieces, stated = stack.pieces(pending, dice.uniform(10, length * 0.2 + 20))
        known += stated
        episode.say_all(pieces)
        for _ in range(dice.randint(1, 6) if known else 0):
            fact = dice.choice(known)
            if dice.random() < 0.5:
                episode.say_all(statement(dice.choice(templates), fact, 1.0))
            else:
                episode.say(f"{question(dice, fact)} ", 0.0)
                episode.say(fact.value, 1.0)
            episode.say(dice.choice((" ", "\n")), TEXT)
    episode.mark(EOS, TEXT)
    return episode


def needle(
    dice: random.Random, length: int, family: Family, num_facts: int = 4
) -> tuple[Episode, Fact]:
    """A text of about `length` tokens with facts at random depths, one question, its answer."""
    while True:
        stack = _Stack(dice, 0.0, held_out=True)
        stated = facts(dice, num_facts, held_out=True)
        talk = chat(family)
        filler, _ = stack.pieces([], length * dice.uniform(0.9, 1.02) - 14 * num_facts - 30)
        sentences = [filler[i : i + 2] for i in range(0, len(filler), 2)]
        for fact in stated:
            template = dice.choice(HELD_OUT_STATEMENTS)
            place = dice.randint(0, len(sentences))
            sentences.insert(place, [*statement(template, fact, 0.0), ("\n", 0.0)])
        wanted = dice.choice(stated)
        pieces = [(text, 0.0) for part in sentences for text, _ in part]
        talk.user([*pieces, ("\n" + question(dice, wanted, held_out=True), 0.0)])
        talk.answer(wanted.value)
        if length * 0.8 < len(talk.episode.tokens()[0]) <= length:
            return talk.episode, wanted
