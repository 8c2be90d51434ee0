"""Numbers as people and models write them: find them in a text, as exact decimals.

In:  the text of an answer.
Out: Decimals in the order of the text, to be compared as values: 18, 18.0 and "$18.00" are equal.
Rules, for digits joined by commas and dots without space:
- "1,234" and "1,00,000" are grouped: the last group has three digits, others two or three, the
  first does not begin with 0. One comma that does not group is a decimal comma: "18,50" is 18.5.
- one dot is a decimal point; several dots group if all groups have three digits ("1.234.567").
- with both, the last one is the decimal sign if the other kind groups ("1.234,56", "1,234.56").
- anything else is several numbers ("1,2,3", "1.2.3").
A minus counts unless a letter, digit, percent sign or closing bracket stands before it: "5-3" is 5
and 3. Digits behind a letter, "_" or "^" are no number ("x2", "cm^2"), unless the letters are a
currency. Percent signs and currencies are dropped. An exponent counts ("1.5e3").
Not here: which of the numbers is the answer (gsm8k.py, arithmetic.py, needle.py).
"""

from __future__ import annotations

import re
from decimal import Decimal

_PLAIN = str.maketrans(
    "０１２３４５６７８９，．＋－−﹣–‒＄￥",
    "0123456789,.+-----$¥",
)
_LATEX = re.compile(r"\{,\}|\\[,!;: ]|\\(?=[$%])")
_THIN_SPACE = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_CURRENCY = r"(?:(?<![A-Za-z])(?:US|AU|CA|A|C)?\$|(?<![A-Za-z])(?:USD|EUR|GBP|INR|Rs)\.?|[€£¥₹₩])"
_NUMERAL = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}%])[-+])?
    (?: {_CURRENCY} [ ]? (?P<late_sign>[-+])? )?
    (?P<run> [0-9]+(?:[.,][0-9]+)* | (?<![\w.])\.[0-9]+ )
    (?P<exponent> [eE][-+]?[0-9]{{1,3}}(?!\w) )?
  | [A-Za-z_^][0-9]+(?:[.,][0-9]+)*    # digits behind a letter: passed over
    """,
    re.VERBOSE,
)


def numbers_in(text: str) -> list[Decimal]:
    """All numbers of a text."""
    plain = _LATEX.sub(lambda found: "," if found[0] == "{,}" else "", text.translate(_PLAIN))
    plain = _THIN_SPACE.sub("", plain)
    numbers: list[Decimal] = []
    for found in _NUMERAL.finditer(plain):
        if found["run"] is None:
            continue
        first, *others = _decimals(found["run"])
        if found["exponent"] and not others:
            first += found["exponent"]
        value = Decimal(first)
        is_negative = "-" in (found["sign"], found["late_sign"])
        numbers.append(value.copy_negate() if is_negative else value)
        numbers += map(Decimal, others)
    return numbers


def _decimals(run: str) -> list[str]:
    """Digits joined by commas and dots, as numbers with a decimal point at most."""
    commas, dots = run.count(","), run.count(".")
    last_comma, last_dot = run.rfind(","), run.rfind(".")
    if dots <= 1 and commas == 0:
        return [run]
    if dots == 0 and commas:
        if _groups(run.split(","), least=2):
            return [run.replace(",", "")]
        if commas == 1:
            return [run.replace(",", ".")]
    if dots > 1 and commas == 0 and _groups(run.split("."), least=3):
        return [run.replace(".", "")]
    if dots == 1 and last_dot > last_comma and _groups(run[:last_dot].split(","), least=2):
        return [run.replace(",", "")]
    if commas == 1 and last_comma > last_dot and _groups(run[:last_comma].split("."), least=3):
        return [run.replace(".", "").replace(",", ".")]
    if commas:
        return [number for part in run.split(",") for number in _decimals(part)]
    whole, fraction, *rest = run.split(".")
    return [f"{whole}.{fraction}", *rest]


def _groups(parts: list[str], least: int) -> bool:
    """Whether digits between separators are the groups of one whole number."""
    first, *middle, last = parts
    return (
        1 <= len(first) <= 3
        and not first.startswith("0")
        and len(last) == 3
        and all(least <= len(part) <= 3 for part in middle)
    )
