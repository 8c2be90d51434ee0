"""docs/laws.md against the tests: every case once, no test lost, none forgotten."""

from __future__ import annotations

import pytest

from tools.laws_table import DOCUMENT, ROOT, complaints, find_tests, read_rows, refreshed

TEXT, TESTS = DOCUMENT.read_text(encoding="utf-8"), find_tests(ROOT)


def test_the_table_is_true() -> None:
    assert complaints(TEXT, TESTS) == []
    assert len(read_rows(TEXT)) == 160
    assert refreshed(TEXT, TESTS) == TEXT


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("| A1 |", "| A99 |", "A99: no such case"),
        ("| A1 |", "| A2 |", "A2: 2 rows"),
        ("| C6 |", "| C66 |", "C6: no row"),
        ("waits for drafts", "waits for spring", "names no part of"),
    ],
)
def test_a_wrong_table_is_seen(old: str, new: str, said: str) -> None:
    assert old in TEXT
    assert any(said in line for line in complaints(TEXT.replace(old, new, 1), TESTS))


def test_a_lost_test_is_seen() -> None:
    fewer = {case: tests for case, tests in TESTS.items() if case != "B9"}
    assert any("B9: is said to be tested" in line for line in complaints(TEXT, fewer))
    more = TESTS | {"J5": ["laws/x.py::test_j5_x"]}
    assert any("J5: laws/x.py::test_j5_x exists" in line for line in complaints(TEXT, more))
