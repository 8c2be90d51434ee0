"""Numbers in texts: every usual way to write one is one value; nothing else is that value."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.evaluate.numerals import numbers_in


def grouped(digits: str, separator: str, indian: bool = False) -> str:
    """Digits in groups, counted from the right, one by one."""
    groups: list[str] = []
    rest = digits
    while rest:
        size = 2 if indian and groups else 3
        groups.insert(0, rest[-size:])
        rest = rest[:-size]
    return separator.join(groups)


@given(
    whole=st.integers(0, 10**30),
    fraction=st.none() | st.text("0123456789", min_size=1, max_size=6),
    style=st.sampled_from(["plain", ",", "\u202f", "\u00a0", "{,}", "\\,", "indian"]),
    sign=st.sampled_from(["", "-", "−", "+"]),
    currency=st.sampled_from(["", "$", "US$", "€", "£", "₹", "USD ", "Rs.", "\\$"]),
    around=st.sampled_from(
        [
            "{}",
            "It is {}.",
            "**{}**",
            "\\boxed{{{}}}",
            "({})",
            "= {} euros",
            "x1, then {}%",
            "{}</s>",
        ]
    ),
)
def test_every_way_to_write_a_number_is_its_value(
    whole: int, fraction: str | None, style: str, sign: str, currency: str, around: str
) -> None:
    digits = str(whole)
    if style == "indian":
        written = grouped(digits, ",", indian=True)
    else:
        written = digits if style == "plain" else grouped(digits, style)
    exact = Decimal(digits if fraction is None else f"{digits}.{fraction}")
    written += "" if fraction is None else f".{fraction}"
    expected = -exact if sign in ("-", "−") else exact
    if expected != exact:
        expected = exact.copy_negate()  # unary minus rounds to 28 digits
    assert numbers_in(around.format(sign + currency + written)) == [expected]


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False, places=2), max_size=8))
def test_numbers_keep_their_order(values: list[Decimal]) -> None:
    assert numbers_in("; ".join(f"{value:f}" for value in values)) == values


@given(st.text(max_size=60))
def test_any_text_is_read(text: str) -> None:
    assert all(value.is_finite() for value in numbers_in(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18.50", ["18.5"]),  # and so never 50
        ("18,50", ["18.5"]),
        ("0,500", ["0.5"]),
        ("1.234,56", ["1234.56"]),
        ("1,234.56", ["1234.56"]),
        ("1.234.567", ["1234567"]),
        ("1,00,000", ["100000"]),
        ("12, 34", ["12", "34"]),
        ("1,2,3", ["1", "2", "3"]),
        ("1.2.3", ["1.2", "3"]),
        ("1,2.5,3", ["1", "2.5", "3"]),
        ("1234,567", ["1234.567"]),
        (".5 of it", ["0.5"]),
        ("18.", ["18"]),
        ("12:30", ["12", "30"]),
        ("5-3=2", ["5", "3", "2"]),
        ("5 - 3 = 2", ["5", "3", "2"]),
        ("5 * -3", ["5", "-3"]),
        ("-$5", ["-5"]),
        ("$-5", ["-5"]),
        ("- 5 apples", ["5"]),  # a bullet
        ("step-3 is 7", ["3", "7"]),
        ("x25 = 4, y_2.5 = 6, cm^2", ["4", "6"]),
        ("Rs500", ["500"]),
        ("1.5e3", ["1500"]),
        ("2E-2", ["0.02"]),
        ("3eggs", ["3"]),
        ("2nd", ["2"]),
        ("50%", ["50"]),
        ("１８", ["18"]),
        ("2² and ٣", ["2"]),
        ("答えは18です", ["18"]),
        ("eighteen", []),
        ("", []),
        ("#### ", []),
    ],
)
def test_corner_cases(text: str, expected: list[str]) -> None:
    assert numbers_in(text) == [Decimal(value) for value in expected]


def test_a_very_long_number_is_exact() -> None:
    digits = "7" * 5000
    assert numbers_in(f"-{digits}")[0] == Decimal(digits).copy_negate()
    assert numbers_in(digits) != numbers_in(digits[:-1] + "8")
