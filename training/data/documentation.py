"""Python's own documentation as text: paragraphs, sentences, words, phrases.

In:  nothing; a random.Random for what is drawn.
Out: tuples of strings, read once: the documentation of the running Python, `pydoc_data.topics` and
the docstrings of its standard library (PSF licence).
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections import Counter
from functools import lru_cache
from importlib import import_module
from pathlib import Path

SPACE = re.compile(r"\s+")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(`])")
WORD = re.compile(r"(?<![\w'`.])[a-z]{4,10}(?![\w'`(.])")


@lru_cache(maxsize=1)
def paragraphs() -> tuple[str, ...]:
    """Paragraphs of documentation, of 80 to 1,200 characters, white space as one space."""
    texts = [text for _, text in sorted(import_module("pydoc_data.topics").topics.items())]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts += _docstrings(path)
    found: dict[str, None] = {}
    for text in texts:
        for part in text.split("\n\n"):
            flat = SPACE.sub(" ", part).strip()
            letters = sum(c.isalpha() or c == " " for c in flat)
            if 80 <= len(flat) <= 1200 and letters > 0.85 * len(flat) and flat.isascii():
                found[flat] = None
    return tuple(found)


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text]


@lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    """Sentences of the documentation, of 20 to 240 characters."""
    cut = (part for text in paragraphs() for part in SENTENCE.split(text))
    return tuple(dict.fromkeys(part for part in cut if 20 <= len(part) <= 240))


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """Words of four to ten letters that the documentation uses twice or more; the most common,
    which are no names for anything, left out."""
    counts = Counter(word for text in sentences() for word in WORD.findall(text))
    ranked = [word for word, count in counts.most_common() if count >= 2]
    return tuple(sorted(ranked[150:]))


def word(dice: random.Random) -> str:
    """One of `words()`."""
    return dice.choice(words())


def phrase(dice: random.Random, count: int) -> str:
    """`count` words that stand beside each other in a sentence, without a digit."""
    while True:
        found = dice.choice(sentences()).split(" ")
        start = dice.randrange(max(1, len(found) - count))
        text = " ".join(found[start : start + count])
        if not any(c.isdigit() or c in "{}" for c in text):
            return text
