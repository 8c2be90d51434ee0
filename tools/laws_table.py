"""Keep docs/laws.md true: every reported case has a row, and every row says how it is tested.

In:  docs/laws.md (rows `| A1 | case | law | test | status |`), the tests under tests/.
Out: `complaints`: what does not agree, one line each; `refreshed`: the document with the test
     column filled in from the tests that are named by a case (test_a1_..., test_b10_...).
Run: `python tools/laws_table.py` checks, `python tools/laws_table.py --write` fills the column in.
Not here: whether the tests pass.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "laws.md"
# How many cases of each kind reference/bugs.md has.
COUNTS = (14, 10, 7, 6, 13, 12, 8, 14, 12, 8, 8, 6, 10, 4, 5, 12, 6, 5)
CASES = dict(zip("ABCDEFGHIJKLMNOPQR", COUNTS, strict=True))
COMING = (
    "DeepSeek-V4",
    "pooled indexer",
    "host tier",
    "drafts",
    "real ranks",
    "parsers",
    "GPU",
)
ROW = re.compile(r"^\| ([A-R]\d+) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$")
TEST = re.compile(r"^def (test_([a-r]\d+)_\w+)\(", re.MULTILINE)
TESTED, WAITS = "tested", "waits for "


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    case: str
    what: str
    law: str
    test: str
    status: str

    def line(self) -> str:
        """The row as it stands in the document."""
        return f"| {self.case} | {self.what} | {self.law} | {self.test} | {self.status} |"


def read_rows(text: str) -> list[Row]:
    """All rows of the document's tables, in order."""
    return [Row(*match.groups()) for line in text.splitlines() if (match := ROW.match(line))]


def find_tests(root: Path) -> dict[str, list[str]]:
    """Case -> its tests as "path::name", by file and place in it."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name, case in TEST.findall(path.read_text(encoding="utf-8")):
            where = path.relative_to(root / "tests").as_posix()
            found.setdefault(case.upper(), []).append(f"{where}::{name}")
    return found


def named(tests: list[str]) -> str:
    """What the test column says: the first test, and how many more there are."""
    more = f" (+{len(tests) - 1})" if len(tests) > 1 else ""
    return f"`{tests[0]}`{more}" if tests else "–"


def complaints(text: str, tests: dict[str, list[str]]) -> list[str]:
    """Everything that does not agree, one sentence each; empty if all is well."""
    rows = read_rows(text)
    counts = Counter(row.case for row in rows)
    known = {f"{kind}{number}" for kind, last in CASES.items() for number in range(1, last + 1)}
    found = [f"{case}: no row" for case in sorted(known - counts.keys())]
    found += [f"{case}: no such case" for case in sorted(counts.keys() - known)]
    found += [f"{case}: {times} rows" for case, times in counts.items() if times > 1]
    for row in rows:
        own = tests.get(row.case, [])
        if row.status.startswith(TESTED):
            if not own:
                found.append(f"{row.case}: is said to be tested, but no test is named by it")
        elif own:
            found.append(f"{row.case}: {own[0]} exists, but its status is '{row.status}'")
        elif not _names_coming(row.status):
            found.append(f"{row.case}: status '{row.status}' names no part of {', '.join(COMING)}")
        if row.test != named(own):
            found.append(f"{row.case}: the test column says {row.test}, found {named(own)}")
    found += [f"{case}: tests without a row" for case in sorted(tests.keys() - counts.keys())]
    return found


def _names_coming(status: str) -> bool:
    parts = status.removeprefix(WAITS).split(", ")
    return status.startswith(WAITS) and all(part in COMING for part in parts)


def refreshed(text: str, tests: dict[str, list[str]]) -> str:
    """The document with the test column as the tests are."""
    lines = []
    for line in text.splitlines():
        match = ROW.match(line)
        if match:
            row = Row(*match.groups())
            line = replace(row, test=named(tests.get(row.case, []))).line()
        lines.append(line)
    return "\n".join(lines) + "\n"


def summary(rows: list[Row]) -> str:
    """How many cases are tested and what the others wait for."""
    waiting = Counter(
        part
        for row in rows
        if row.status.startswith(WAITS)
        for part in row.status.removeprefix(WAITS).split(", ")
    )
    tested = sum(row.status.startswith(TESTED) for row in rows)
    others = ", ".join(f"{part} {count}" for part, count in waiting.most_common())
    return f"{len(rows)} cases, {tested} tested; waiting for: {others}"


def main() -> int:
    """Check or write; the exit code."""
    text, tests = DOCUMENT.read_text(encoding="utf-8"), find_tests(ROOT)
    if "--write" in sys.argv[1:]:
        text = refreshed(text, tests)
        DOCUMENT.write_text(text, encoding="utf-8")
    found = complaints(text, tests)
    for line in found:
        print(line)
    print(summary(read_rows(text)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
