"""Short English: Python's own documentation, stories by a small grammar, logs, small talk.

In:  a random.Random.
Out: sentences of filler; whole episodes of text or small talk.
"""

from __future__ import annotations

import random

from training.data.documentation import paragraphs, sentences
from training.data.words import CITIES, COLOURS, NAMES, QUALITIES, THINGS, WEEKDAYS, pseudo_word
from training.data.writing import BOS, EOS, Episode, Family, chat

TEXT = 0.3

_STORIES = (
    "{name} lives in {city} and works near the {thing}.",
    "The {quality} {thing} stood beside the {colour} {thing2}.",
    "On {day} {name} walked to the {thing} with {name2}.",
    "{name} asked {name2} about the {quality} {thing}, but {name2} said nothing.",
    "It was a {quality} morning in {city}, and the {thing} was {colour}.",
    "Nobody in {city} had seen such a {quality} {thing} before.",
    "{name} put the {thing} into the {thing2} and went home.",
    "Every {day} the people of {city} sell {colour} {thing}s at the market.",
    "The {thing} is {quality}, the {thing2} is {quality2}, and both are {colour}.",
    "Later that day {name} found a {colour} {thing} under the {thing2}.",
    "{name} thanked {name2} and promised to bring the {thing} back on {day}.",
    "There are {small} {thing}s and {small2} {thing2}s in the house of {name}.",
    "The train to {city} leaves at {hour} o'clock from platform {small}.",
    "{name} paid {small} coins for a {quality} {thing}.",
    "When the rain stopped, {name} opened the {quality} window and looked at the {thing}.",
    "The word {pseudo} means {thing} in the language of {city}.",
    "The {thing} weighs {small} pounds, the {thing2} {small2}.",
    "{name} waited {small} days for a {quality} {thing}.",
    "From the {thing} one sees {small} {colour} houses.",
    "They counted {big} visitors at the {quality} {thing} last year.",
    "{name2} painted the {thing} {colour} and the {thing2} {quality}.",
    "The {quality} {thing} is older than the {quality2} one.",
    "It was {hour} o'clock when {name} left the {thing}.",
    "{name} drew a {thing}, {small} stars and a {quality} {thing2}.",
    "Who made the {thing}? {name} said it was {name2} of {city}.",
    "{small} of the {thing}s are {quality}, {small2} are {quality2}.",
)
_LOGS = (
    "[{hour}:{minute}] {name} opened {thing} {small}",
    "INFO request {big} took {small} ms",
    "{pseudo}.{thing} started with {small} workers",
    "WARNING {thing} {big} is {quality}",
    "GET /{thing}/{big} {colour} {small}",
    "item {big}: {quality} {thing}, {colour}, {small} pieces",
    "{thing} {small}, {thing2} {small2}",
    "{quality} {thing}: {name}, {city}, {hour}:{minute}",
)
_CHAT = (
    ("Hello", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Who are you?", "I am a tiny model that ships with gnomon. I can look things up in a text, "
     "add and subtract, and write tool calls."),
    ("What can you do?", "I can find a number in a long text, add and subtract small numbers, "
     "and write tool calls."),
    ("What is your name?", "I am the tiny model of gnomon."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Bye", "Goodbye!"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("What is a gnomon?", "A gnomon is the part of a sundial that casts the shadow."),
    ("Tell me a story.", None),
)  # fmt: skip


def story_sentence(dice: random.Random) -> str:
    """A sentence of the grammar."""
    return _fill(dice, dice.choice(_STORIES))


def sentence_about(dice: random.Random, words: tuple[str, ...]) -> str:
    """A story's sentence or a line of a log with the first or the last of `words` in it."""
    kind = dice.choice(("thing", "thing", "quality"))
    word = words[-1] if kind == "thing" else words[0]
    pool = [text for text in (*_STORIES, *_LOGS) if f"{{{kind}}}" in text]
    return _fill(dice, dice.choice(pool), {kind: word})


def _fill(dice: random.Random, template: str, given: dict[str, str] | None = None) -> str:
    name, name2 = dice.sample(NAMES, 2)
    values: dict[str, str | int] = dict(
        name=name, name2=name2, city=dice.choice(CITIES), thing=dice.choice(THINGS),
        thing2=dice.choice(THINGS), colour=dice.choice(COLOURS), quality=dice.choice(QUALITIES),
        quality2=dice.choice(QUALITIES), day=dice.choice(WEEKDAYS), small=dice.randint(2, 30),
        small2=dice.randint(2, 30), hour=dice.randint(1, 12), minute=dice.randint(10, 59),
        big=dice.randint(100, 99999), pseudo=pseudo_word(dice),
    )  # fmt: skip
    return template.format(**values | (given or {}))


def sentence(dice: random.Random, kind: str) -> str:
    """Filler: "docs", "story", "log", or any of them ("mixed")."""
    if kind == "mixed":
        kind = dice.choice(("docs", "story", "log"))
    if kind == "docs":
        return dice.choice(sentences())
    return story_sentence(dice) if kind == "story" else _fill(dice, dice.choice(_LOGS))


def prose(dice: random.Random, length: int) -> Episode:
    """A few paragraphs of documentation or a story."""
    episode = Episode()
    episode.mark(BOS)
    if dice.random() < 0.6:
        first = dice.randrange(len(paragraphs()))
        for text in paragraphs()[first : first + max(1, length // 100)]:
            episode.say(text + "\n\n", TEXT)
    else:
        for _ in range(max(2, length // 20)):
            episode.say(story_sentence(dice) + " ", TEXT)
    episode.mark(EOS, TEXT)
    return episode


def small_talk(dice: random.Random, length: int, family: Family) -> Episode:
    """A turn or a few."""
    talk = chat(family, dice.choice(("", "You are a helpful assistant.")))
    for _ in range(dice.randint(1, 3)):
        said, reply = dice.choice(_CHAT)
        talk.user([(said, 0.0)])
        talk.answer(reply or " ".join(story_sentence(dice) for _ in range(dice.randint(2, 4))))
    return talk.episode
