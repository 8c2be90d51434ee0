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

from training.data.english import sentence, sentence_about
from training.data.wording import (
    HELD_OUT_NOUNS,
    HELD_OUT_QUESTIONS,
    HELD_OUT_STATEMENTS,
    noun,
    question_template,
    statement_template,
)
from training.data.words import COLOURS, digits, keys, parts
from training.data.writing import BOS, EOS, Episode, Family, Piece, chat

INTRODUCTIONS = (
    "", "", "Read this text.\n\n", "Here are some notes.\n", "Text:\n", "I will ask about this.\n",
    "The following list may help.\n\n", "Memorise these facts.\n",
)  # fmt: skip
TEXT = 0.05  # weight of filler and wording
NEARNESS = (0.0, 0.05, 0.3, 0.6)  # of episodes; see FactText
THE = "the "


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that can be asked; of the noun "colour" the value is a word, else a number."""

    key: str
    noun: str
    value: str


def facts(dice: random.Random, count: int, held_out: bool = False) -> list[Fact]:
    """Facts of different keys, sharing few nouns."""
    nouns = [dice.choice(HELD_OUT_NOUNS) if held_out else noun(dice) for _ in range(3)]
    nouns = nouns[: dice.randint(1, 3)]
    if not held_out and dice.random() < 0.08:
        return [Fact(key, "colour", dice.choice(COLOURS)) for key in keys(dice, count, False)]
    length = dice.choice((None, None, None, 4, 5, 6))
    chosen = keys(dice, count, held_out)
    if not held_out and dice.random() < 0.25:
        chosen = [THE + key if key.islower() and " " in key else key for key in chosen]
    return [Fact(key, dice.choice(nouns), digits(dice, length)) for key in chosen]


def statement(template: str, fact: Fact, value_weight: float) -> list[Piece]:
    """The pieces of a sentence that states a fact."""
    head, tail = template.split("{value}")
    fill = {"noun": fact.noun, "key": fact.key}
    return [
        (head.format(**fill).replace(THE + THE, THE), TEXT),
        (fact.value, value_weight),
        (tail.format(**fill), TEXT),
    ]


def question(dice: random.Random, fact: Fact, held_out: bool = False) -> str:
    """A question about a fact, by its own noun or as a plain number."""
    template = dice.choice(HELD_OUT_QUESTIONS) if held_out else question_template(dice)
    if fact.noun == "colour":
        template = dice.choice(("What is the {noun} of {key}?", "Which {noun} has {key}?"))
    asked = fact.noun if dice.random() < 0.7 or fact.noun == "colour" else "number"
    return template.format(noun=asked, key=fact.key).replace(THE + THE, THE)


class FactText:
    """Writes facts and filler, with one separator and few wordings an episode.

    `nearness`: share of the filler that has one word of a key in it, but not the key: text about a
    lamp beside the number for the red lamp. 0: no filler has, as far as that can be had.
    """

    def __init__(
        self, dice: random.Random, density: float, pending: list[Fact], nearness: float = 0.0
    ) -> None:
        self._dice, self._density, self._pending = dice, density, pending
        self._nearness = nearness
        self._longer: list[tuple[str, ...]] = []  # keys of more than one word
        self._keys_of: dict[str, list[frozenset[str]]] = {}
        for words in (parts(fact.key.removeprefix(THE)) for fact in pending):
            self._longer += [words] if len(words) > 1 else []
            for word in words:
                self._keys_of.setdefault(word, []).append(frozenset(words))
        count = dice.choice((1, 1, 2, 3, 6))
        self._templates = [statement_template(dice) for _ in range(count)]
        self._fresh = dice.choice((0.0, 0.0, 0.3, 1.0))  # share of wordings used once
        self._separator = dice.choice((" ", "\n", "\n", "\n\n"))
        self._filler = dice.choice(("docs", "docs", "story", "log", "mixed"))
        if not all(template.endswith((".", "!", ";")) for template in self._templates):
            self._separator = "\n"

    def pieces(self, budget: float) -> tuple[list[Piece], list[Fact]]:
        """About `budget` tokens; the facts that they state, taken from the pending ones.

        Filler never has a whole key in it if that can be had, so that a question has one answer.
        """
        out: list[Piece] = []
        pending = self._pending
        stated: list[Fact] = []
        size = 0.0
        while size < budget:
            if pending and self._dice.random() < self._density:
                fact = pending.pop()
                out += self._statement(fact)
                stated.append(fact)
                size += 10 + len(fact.key) / 3 + len(fact.value)
            else:
                text = self._filler_sentence()
                out.append((text, TEXT))
                size += len(text) / 3.3 + 1
            out.append((self._separator, TEXT))
        return out, stated

    def scattered(self, budget: float) -> tuple[list[Piece], list[Fact]]:
        """About `budget` tokens of filler with all pending facts in it, at any depth each."""
        count = len(self._pending)
        wanted, self._pending = self._pending, []
        filler, _ = self.pieces(max(0.0, budget - 20 * count))
        sentences = [filler[i : i + 2] for i in range(0, len(filler), 2)]
        for fact in wanted:
            own = [*self._statement(fact), (self._separator, TEXT)]
            sentences.insert(self._dice.randint(0, len(sentences)), own)
        return [piece for one in sentences for piece in one], wanted

    def _statement(self, fact: Fact) -> list[Piece]:
        is_fresh = self._dice.random() < self._fresh
        known = self._templates
        wording = statement_template(self._dice) if is_fresh else self._dice.choice(known)
        return statement(wording, fact, 0.0)

    def _filler_sentence(self) -> str:
        for _ in range(8):
            if self._longer and self._nearness and self._dice.random() < self._nearness:
                text = sentence_about(self._dice, self._dice.choice(self._longer))
            else:
                text = sentence(self._dice, self._filler)
            words = set(parts(text))
            near = [key for word in words for key in self._keys_of.get(word, ())]
            if not (any(key <= words for key in near) if self._nearness else near):
                break
        return text


def _thoughts(fact: Fact) -> str:
    return f"The text says: the {fact.noun} for {fact.key} is {fact.value}."


def recall(dice: random.Random, length: int, family: Family) -> Episode:
    """An episode of about `length` tokens. It may be shorter where all facts were asked for."""
    style = dice.choice(("big", "big", "gradual", "gradual", "raw", "scattered", "scattered"))
    if style == "raw":
        return _raw(dice, length)
    if style == "scattered":
        return scattered(dice, length, family)
    talk = chat(family, dice.choice(("", "", "You are a helpful assistant.")))
    dense = dice.random() < 0.75
    pending = facts(dice, max(3, length // 14) if dense else dice.randint(1, 8))
    density = dice.uniform(0.4, 1.0) if dense else dice.uniform(0.02, 0.2)
    stack = FactText(dice, density, pending, dice.choice(NEARNESS))
    opening: list[Piece] = [(dice.choice(INTRODUCTIONS), TEXT)]
    budget = length * (dice.uniform(0.45, 0.85) if style == "big" else dice.uniform(0.1, 0.4))
    more, known = stack.pieces(budget)
    asked: dict[str, int] = {}
    while True:
        while not known or (style == "gradual" and pending and dice.random() < 0.25):
            extra, stated = stack.pieces(length * 0.04 + 10)
            more, known = more + extra, known + stated
        fact = dice.choice(known)
        asked[fact.key] = asked.get(fact.key, 0) + 1
        talk.user([*opening, *more, (question(dice, fact), 0.0)])
        opening, more = [], []
        thinks = dice.random() < 0.06
        talk.answer(fact.value, _thoughts(fact) if thinks else None)
        is_long = talk.episode.num_characters > length * 3.6
        if is_long or asked[fact.key] > 3 or len(asked) > length // 24 + 4:
            return talk.episode


def scattered(dice: random.Random, length: int, family: Family) -> Episode:
    """An episode of much filler, a few facts at any depth, the questions about them at the end."""
    talk = chat(family, dice.choice(("", "", "", "You are a helpful assistant.")))
    stated = facts(dice, dice.randint(2, max(4, min(16, length // 60))))
    stack = FactText(dice, 0.0, list(stated), dice.choice(NEARNESS))
    budget = length * dice.uniform(0.8, 0.95) - 30 * len(stated)
    text, _ = stack.scattered(max(budget, 20 * len(stated)))
    before: list[Piece] = [(dice.choice(INTRODUCTIONS), TEXT), *text]
    for fact in dice.sample(stated, len(stated)):
        talk.user([*before, (dice.choice(("", "\n", "\n\n")), 0.0), (question(dice, fact), 0.0)])
        talk.answer(fact.value)
        before = []
    return talk.episode


def _raw(dice: random.Random, length: int) -> Episode:
    """A text that states its facts more than once: the second time they can be known."""
    episode = Episode()
    episode.mark(BOS)
    density = dice.uniform(0.3, 1.0)
    stack = FactText(dice, density, facts(dice, max(3, length // 30)), dice.choice(NEARNESS))
    known: list[Fact] = []
    templates = [statement_template(dice) for _ in range(3)]
    while episode.num_characters < length * 3.2:
        pieces, stated = stack.pieces(dice.uniform(10, length * 0.2 + 20))
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
    dice: random.Random, length: int, family: Family, num_facts: int = 4, nearness: float = 0.0
) -> tuple[Episode, Fact]:
    """A text of about `length` tokens with facts at random depths, one question, its answer."""
    while True:
        stated = facts(dice, num_facts, held_out=True)
        stack = FactText(dice, 0.0, stated, nearness)
        talk = chat(family)
        filler, _ = stack.pieces(length * dice.uniform(0.9, 1.02) - 14 * num_facts - 30)
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
