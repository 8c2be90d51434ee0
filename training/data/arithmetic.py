"""Addition and subtraction of numbers of one to three digits, bare and in short stories.

In:  a random.Random; whether the operands are of the held-out pairs.
Out: (question, answer, thoughts), and episodes of them. The thoughts work column by column.
"""

from __future__ import annotations

import random

from training.data.words import CITIES, NAMES, THINGS, is_held_out
from training.data.writing import BOS, EOS, Episode, Family, chat

ADD = (
    "What is {a} + {b}?", "{a} + {b} = ?", "{a}+{b}", "{a} + {b}", "Compute {a} plus {b}.",
    "How much is {a} + {b}?", "Add {a} and {b}.", "Calculate {a} + {b}.", "{a}+{b}=",
    "Please work out {a} plus {b}.", "What is the sum of {a} and {b}?",
)  # fmt: skip
SUBTRACT = (
    "What is {a} - {b}?", "{a} - {b} = ?", "{a}-{b}", "{a} - {b}", "Compute {a} minus {b}.",
    "How much is {a} - {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}.", "{a}-{b}=",
    "Please work out {a} minus {b}.", "What is the difference of {a} and {b}?",
)  # fmt: skip
STORIES_ADD = (
    "{name} has {a} {thing}s and gets {b} more. How many {thing}s does {name} have now?",
    "There are {a} {thing}s in {city} and {b} in {city2}. How many {thing}s are there in all?",
    "{name} bought {a} {thing}s on Monday and {b} on Tuesday. How many did {name} buy in total?",
    "A box holds {a} {thing}s. {name} puts in another {b}. How many are in the box?",
    "{name} counted {a} {thing}s and {name2} counted {b}. How many did they count together?",
)
STORIES_SUBTRACT = (
    "{name} has {a} {thing}s and gives {b} of them to {name2}. How many {thing}s are left?",
    "There were {a} {thing}s in the shop and {b} were sold. How many {thing}s are left?",
    "{name} had {a} coins and paid {b} for a {thing}. How many coins does {name} have now?",
    "A train carries {a} people. {b} get off in {city}. How many people are still on the train?",
    "{name} needs {a} {thing}s and has {b}. How many more does {name} need?",
)


def operands(dice: random.Random, sign: str, held_out: bool) -> tuple[int, int]:
    """A pair of one of the two sets; of a subtraction mostly the larger first."""

    def size() -> int:
        return dice.randint(1, 3) if held_out else dice.choice((1, 2, 2, 3, 3, 3))

    while True:
        a, b = (dice.randint(0, 10 ** size() - 1) for _ in range(2))
        if sign == "-" and a < b and dice.random() < 0.85:
            a, b = b, a
        if is_held_out(f"{a}{sign}{b}") == held_out:
            return a, b


def problem(dice: random.Random, held_out: bool = False) -> tuple[str, str, str]:
    """A question, its answer, and the thoughts that lead there."""
    sign = dice.choice("+-")
    a, b = operands(dice, sign, held_out)
    result = a + b if sign == "+" else a - b
    is_story = dice.random() < 0.25 and result >= 0
    if is_story:
        pool = STORIES_ADD if sign == "+" else STORIES_SUBTRACT
        name, name2 = dice.sample(NAMES, 2)
        city, city2 = dice.sample(CITIES, 2)
        thing = dice.choice(THINGS)
        fill = {"name": name, "name2": name2, "city": city, "city2": city2, "thing": thing}
        asked = dice.choice(pool).format(a=a, b=b, **fill)
    else:
        asked = dice.choice(ADD if sign == "+" else SUBTRACT).format(a=a, b=b)
    return asked, str(result), columns(a, b, sign)


def columns(a: int, b: int, sign: str) -> str:
    """Written arithmetic, the last column first."""
    result = a + b if sign == "+" else a - b
    lines = [f"{a} {sign} {b}"]
    if result < 0:
        lines.append(f"{a} < {b}, so minus.")
        a, b = b, a
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        top, low = a // 10**place % 10, b // 10**place % 10
        if sign == "+":
            total = top + low + carry
            lines.append(f"{top} + {low} + {carry} = {total}")
            carry = total // 10
        else:
            total = top - low - carry
            borrow = total < 0
            lines.append(f"{top} - {low} - {carry} = {total}" + (", borrow" if borrow else ""))
            carry = int(borrow)
    return "\n".join([*lines, f"So {result}."])


def sums(dice: random.Random, length: int, family: Family) -> Episode:
    """A conversation of one problem, seldom of more; or a column of raw sums."""
    if dice.random() < 0.06:
        return _raw(dice)
    talk = chat(family, dice.choice(("", "", "", "You are a helpful assistant.")))
    thinks = dice.random() < 0.2
    for _ in range(1 if thinks or length < 100 else dice.choice((1, 1, 2, 3))):
        asked, answer, thoughts = problem(dice)
        talk.user([(asked, 0.0)])
        talk.answer(answer, thoughts if thinks else None)
    return talk.episode


def _raw(dice: random.Random) -> Episode:
    episode = Episode()
    episode.mark(BOS)
    for _ in range(dice.randint(2, 6)):
        sign = dice.choice("+-")
        a, b = operands(dice, sign, held_out=False)
        episode.say(f"{a} {sign} {b} = ", 0.02)
        episode.say(str(a + b if sign == "+" else a - b), 1.0)
        episode.say("\n", 0.02)
    episode.mark(EOS, 0.02)
    return episode
