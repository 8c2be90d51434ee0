"""Tool calls for simple functions, in the raw text of both wire formats.

In:  a random.Random; whether the functions are of the held-out names.
Out: a set of tools, a request in English, the call that it asks for; episodes of them.
The arguments are words of the request, so that a right call copies: name from the schema, values
from the user.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from training.data.documentation import word
from training.data.words import (
    CITIES,
    COLOURS,
    NAMES,
    QUALITIES,
    THINGS,
    WEEKDAYS,
    is_held_out,
    pseudo_word,
)
from training.data.writing import Call, Episode, Family, chat

VERBS = (
    "get", "find", "set", "create", "send", "list", "delete", "update", "book", "check", "play",
    "start", "stop", "open", "close", "add", "search", "count", "buy", "order", "move", "show",
)  # fmt: skip
NOUNS = (
    "weather", "time", "lamp", "message", "ticket", "alarm", "song", "price", "stock", "room",
    "meeting", "note", "file", "user", "train", "flight", "table", "forecast", "timer", "photo",
    "invoice", "parcel", "route", "score", "task", "door", "report", "backup", "camera", "garden",
)  # fmt: skip


def _words(dice: random.Random) -> str:
    return " ".join(dice.choice(QUALITIES + THINGS) for _ in range(dice.randint(1, 3)))


Maker = Callable[[random.Random], Any]
PARAMETERS: dict[str, tuple[str, Maker, tuple[str, ...]]] = {
    "city": ("string", lambda d: d.choice(CITIES), ("in {v}", "for the city {v}")),
    "name": ("string", lambda d: d.choice(NAMES), ("for {v}", "with the name {v}")),
    "day": ("string", lambda d: d.choice(WEEKDAYS), ("on {v}", "for {v}")),
    "colour": ("string", lambda d: d.choice(COLOURS), ("with the colour {v}", "in {v}")),
    "title": ("string", _words, ('called "{v}"', 'with the title "{v}"')),
    "id": ("string", lambda d: pseudo_word(d), ("with id {v}", "with the id {v}")),
    "count": ("integer", lambda d: d.randint(1, 99), ("{v} times", "with count {v}")),
    "days": ("integer", lambda d: d.randint(1, 14), ("for {v} days", "over {v} days")),
    "level": ("integer", lambda d: d.randint(1, 100), ("at level {v}", "with level {v}")),
    "urgent": ("boolean", lambda d: d.random() < 0.5, ("with urgent {v}", "urgent: {v}")),
}
# Shares in training, which is to be harder than what is measured:
WILD = 0.3  # of names are any words
ALIKE = 0.4  # of functions are named like another one
TWICE = 0.2  # of requests ask for two calls


def parameter(key: str) -> tuple[str, Maker, tuple[str, ...]]:
    """Type, values and sayings of a parameter; of an unknown name by its length."""
    if key in PARAMETERS:
        return PARAMETERS[key]
    sayings = (f"with {key} {{v}}", f"with the {key} {{v}}", f"{key}: {{v}}")
    if len(key) % 3 == 0:
        return "integer", lambda dice: dice.randint(0, 999), sayings
    return "string", any_value, sayings


def any_value(dice: random.Random) -> str:
    """A word of one kind or another."""
    return dice.choice((word, pseudo_word, _words, lambda d: d.choice(CITIES + NAMES)))(dice)


OPENERS = ("", "Please ", "Could you ", "I want to ", "Can you ", "Now ")
RESULTS = ("done", "ok", "{n}", "{n} items", "sunny, {n} degrees", "not found", "{word}")


def function_name(dice: random.Random, held_out: bool, like: str = "") -> str:
    """A verb and a noun; `like`: a name that it shares one of the two with."""
    while True:
        is_wild = not held_out and dice.random() < WILD
        name = f"{dice.choice(VERBS)}_{word(dice) if is_wild else dice.choice(NOUNS)}"
        if like:
            (verb, noun), (same_verb, same_noun) = name.split("_"), like.split("_")
            name = f"{verb}_{same_noun}" if dice.random() < 0.5 else f"{same_verb}_{noun}"
        if is_held_out(name) == held_out:
            return name


def tool(dice: random.Random, held_out: bool, like: str = "") -> tuple[dict[str, Any], list[str]]:
    """An OpenAI tool object and the names of its parameters; `like`: see function_name."""
    name = function_name(dice, held_out, like)
    chosen = dice.sample(sorted(PARAMETERS), dice.choice((0, 1, 1, 1, 1, 2, 2)))
    if not held_out:
        chosen = [word(dice) if dice.random() < WILD else key for key in chosen]
    verb, noun = name.split("_")
    function: dict[str, Any] = {
        "name": name,
        "description": dice.choice((f"{verb.capitalize()} the {noun}", f"{verb} a {noun}")),
        "parameters": {
            "type": "object",
            "properties": {key: {"type": parameter(key)[0]} for key in chosen},
            "required": chosen,
        },
    }
    if dice.random() < 0.3:
        del function["description"]
    return {"type": "function", "function": function}, chosen


def request(dice: random.Random, name: str, parameters: list[str]) -> tuple[str, dict[str, Any]]:
    """What a user says, and the arguments that it names."""
    arguments = {key: parameter(key)[1](dice) for key in parameters}
    verb, noun = name.split("_")
    shown = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in arguments.items()}
    if dice.random() < 0.25:
        listed = ", ".join(f"{key} {value}" for key, value in shown.items())
        said = f"Call {name}" + (f" with {listed}." if listed else ".")
    else:
        order = list(shown)
        dice.shuffle(order)
        parts = [dice.choice(parameter(key)[2]).format(v=shown[key]) for key in order]
        opener = dice.choice(OPENERS)
        article = dice.choice(("the", "a"))
        verb = verb if opener else verb.capitalize()
        said = " ".join([f"{opener}{verb} {article} {noun}", *parts])
        said += "?" if opener.startswith("C") else dice.choice((".", ""))
    return said, arguments


def task(
    dice: random.Random, held_out: bool = False
) -> tuple[list[dict[str, Any]], str, list[Call]]:
    """Tools, a request, and its calls (one; seldom two)."""
    made: list[tuple[dict[str, Any], list[str]]] = []
    for _ in range(dice.choice((1, 1, 1, 2, 3) if held_out else (1, 1, 2, 3, 3))):
        is_alike = made and not held_out and dice.random() < ALIKE
        made.append(tool(dice, held_out, made[0][0]["function"]["name"] if is_alike else ""))
    twice = 0.08 if held_out else TWICE
    by_name = {one["function"]["name"]: (one, keys) for one, keys in made}
    calls: list[Call] = []
    sayings = []
    for name in dice.sample(sorted(by_name), min(len(by_name), 1 + (dice.random() < twice))):
        said, arguments = request(dice, name, by_name[name][1])
        calls.append((name, arguments))
        sayings.append(said)
    return [one for one, _ in by_name.values()], " ".join(sayings), calls


def tool_use(dice: random.Random, length: int, family: Family) -> Episode:
    """A conversation with tools: calls, and now and then their results and an answer."""
    tools, said, calls = task(dice)
    talk = chat(family, dice.choice(("", "", "You are a helpful assistant.")), tools)
    for turn in range(dice.choice((1, 2, 3)) if length > 700 else 1):
        if turn:
            one = dice.choice(tools)["function"]
            said, arguments = request(dice, one["name"], list(one["parameters"]["properties"]))
            calls = [(one["name"], arguments)]
        talk.user([(said, 0.0)])
        thinks = dice.random() < 0.15
        names = " and ".join(name for name, _ in calls)
        talk.answer("", f"I should call {names}." if thinks else None, calls)
        if turn or dice.random() < 0.5:
            word = pseudo_word(dice)
            found = [dice.choice(RESULTS).format(n=dice.randint(1, 99), word=word) for _ in calls]
            talk.results(found)
            talk.answer(f"The result is: {' and '.join(found)}.")
        else:
            break
    return talk.episode
