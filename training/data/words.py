"""Words, names and keys; and the line between what is trained on and what is kept for measuring.

In:  a random.Random.
Out: keys to be looked up, of many kinds; values; lists of words.
`is_held_out(text)` is true for an eighth of all texts, by a checksum: such keys, function names and
pairs of operands are never trained on.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from functools import lru_cache

from training.data.documentation import word


def is_held_out(text: str) -> bool:
    """Whether text is for measuring only."""
    return zlib.crc32(text.encode()) % 8 == 0


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Ada Bo Carla Dmitri Elena Farid Grace Hiro Ines Jonas Kofi Lena Mei Noor Oskar Priya Quinn "
    "Rosa Samir Tara Uma Victor Wanda Xin Yusuf Zoe Anna Ben Clara David Emma Frank Hana Ivan "
    "Julia Karl Laura Marco Nina Omar Paula Ravi Sara Tom Vera Will"
)
CITIES = _words(
    "Berlin Paris Oslo Lisbon Rome Vienna Prague Dublin Athens Cairo Lagos Nairobi Delhi Tokyo "
    "Kyoto Beijing Hangzhou Seoul Lima Quito Boston Denver Madrid London Zurich Warsaw Sofia "
    "Helsinki Riga Tunis Accra Hanoi Manila Havana Bogota Toronto Chicago Seattle Dallas Austin"
)
COLOURS = _words(
    "red green blue amber violet silver golden white black copper grey brown pink orange purple "
    "yellow ivory scarlet"
)
THINGS = _words(
    "apple pear book pen coin stamp shell marble card bottle key lamp ticket box chair letter map "
    "stone plate flower clock door window bridge river garden tower engine piano violin hammer "
    "ladder basket candle mirror carpet pillow kettle bucket wagon saddle anchor harbour castle "
    "forest valley island mountain desert planet comet rocket camera radio printer cable battery "
    "ribbon button needle blanket helmet whistle drum trumpet feather acorn walnut lemon melon "
    "pepper onion carrot tomato potato biscuit pancake sandwich teapot spoon fork bowl cup jar"
)
QUALITIES = _words(
    "old new small big quiet loud bright dark soft hard cold warm slow quick heavy light round "
    "flat long short deep shallow clean dusty broken hidden wooden stone glass paper iron happy "
    "lazy brave gentle curious patient silent distant northern southern"
)
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_ONSETS = _words("b d f g h j k l m n p r s t v w z br dr gr kr pl st tr sh ch th qu x y")
_VOWELS = _words("a e i o u a e i o ai ou ea")
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "x", "nd"]


def pseudo_word(dice: random.Random, syllables: int | None = None) -> str:
    """A word that nobody has seen, of one to three syllables."""
    count = syllables or dice.choice((2, 2, 2, 3, 3, 1))
    word = "".join(
        dice.choice(_ONSETS) + dice.choice(_VOWELS) + dice.choice(_CODAS) for _ in range(count)
    )
    return word if len(word) > 2 else word + dice.choice(_ONSETS)


def letters(dice: random.Random, count: int) -> str:
    """Random letters, all small or all large."""
    text = "".join(dice.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(count))
    return text.upper() if dice.random() < 0.5 else text


KEY_KINDS: tuple[Callable[[random.Random], str], ...] = (
    pseudo_word,
    lambda dice: pseudo_word(dice).capitalize(),
    lambda dice: dice.choice(THINGS),
    lambda dice: f"{dice.choice(COLOURS)} {dice.choice(THINGS)}",
    lambda dice: f"{dice.choice(QUALITIES)} {dice.choice(THINGS)}",
    lambda dice: f"{dice.choice(NAMES)}'s {dice.choice(THINGS)}",
    lambda dice: letters(dice, dice.randint(2, 4)),
    lambda dice: f"{letters(dice, 2)}-{letters(dice, 2)}",
    lambda dice: f"{pseudo_word(dice, 2)}-{pseudo_word(dice, 1)}",
    lambda dice: f"{dice.choice(COLOURS)}-{dice.choice(THINGS)}",
    lambda dice: f"{pseudo_word(dice, 1)}@{dice.choice(CITIES).lower()}",
    lambda dice: f"{pseudo_word(dice, 2)} {dice.choice(THINGS)}",
    lambda dice: f"{word(dice)} {word(dice)}",
    lambda dice: f"{dice.choice(QUALITIES)} {word(dice)}",
    lambda dice: f"{word(dice)} {pseudo_word(dice, 2)}",
    lambda dice: f"{pseudo_word(dice, 2)} {pseudo_word(dice, 2)}",
    lambda dice: pseudo_word(dice, 3).capitalize(),
)
_ENDLESS = (*KEY_KINDS[:2], *KEY_KINDS[7:9], KEY_KINDS[11], KEY_KINDS[15])
_FIRST_WORDS: tuple[Callable[[random.Random], str], ...] = (
    word,
    lambda dice: dice.choice(QUALITIES),
    lambda dice: dice.choice(COLOURS),
    lambda dice: pseudo_word(dice, 2),
)
_SECOND_WORDS: tuple[Callable[[random.Random], str], ...] = (
    word,
    lambda dice: dice.choice(THINGS),
    lambda dice: dice.choice(THINGS),
    lambda dice: pseudo_word(dice, 2),
)
_PARTS = re.compile(r"[\w']+")


@lru_cache(maxsize=2**14)
def parts(text: str) -> tuple[str, ...]:
    """The words of a text, in small letters."""
    return tuple(_PARTS.findall(text.lower()))


def crossed(dice: random.Random, count: int) -> Callable[[random.Random], str]:
    """A kind of keys of two words, few of each: a red lamp, a blue lamp, a red box."""
    size = max(2, int(1.5 * count**0.5))
    first, second = (
        [dice.choice(one)(dice) for _ in range(size)] for one in (_FIRST_WORDS, _SECOND_WORDS)
    )
    mark = " "
    if dice.random() < 0.25:
        first, second = ([letters(dice, 2).upper() for _ in range(size)] for _ in range(2))
        mark = "-"
    return lambda dice: f"{dice.choice(first)}{mark}{dice.choice(second)}"


def keys(dice: random.Random, count: int, held_out: bool) -> list[str]:
    """Different keys of few kinds, none of which is a word of another.

    Real words come in either set as they are, invented ones in theirs alone (`is_held_out`).
    """
    kinds = dice.sample(KEY_KINDS, dice.choice((1, 2, 3, 5, 8)))
    if not held_out and dice.random() < 0.3:
        kinds = [*kinds[: dice.randint(0, 2)], *[crossed(dice, count)] * 2]
    found: dict[str, None] = {}
    single: set[str] = set()
    composed: set[str] = set()
    tries = 0
    while len(found) < count:
        tries += 1
        if tries > 3 * count + 20:
            kinds = list(_ENDLESS)  # a small kind is used up
        key = dice.choice(kinds)(dice)
        words = parts(key)
        clashes = words[0] in composed if len(words) == 1 else not single.isdisjoint(words)
        if clashes or key in found or is_held_out(key) != held_out:
            continue
        found[key] = None
        (single if len(words) == 1 else composed).update(words)
    return list(found)


def digits(dice: random.Random, count: int | None = None) -> str:
    """A number of four to six digits, now and then shorter or longer."""
    count = count or dice.choice((4, 4, 5, 5, 5, 6, 6, 3, 7, 2))
    return str(dice.randint(1, 9)) + "".join(str(dice.randint(0, 9)) for _ in range(count - 1))
