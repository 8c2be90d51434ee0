"""Print the ten slowest tests of a run.

In:  a folder of JUnit XML files, as `make test` writes them, one per stage.
Out: a table of seconds and test, slowest first, and the number of tests and seconds in all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

NUM_SHOWN = 10


def read_times(folder: Path) -> list[tuple[float, str]]:
    """(seconds, test) of every test case in every report of the folder, slowest first."""
    return sorted(
        (
            (float(case.get("time", "0")), f"{case.get('classname')}::{case.get('name')}")
            for report in folder.glob("*.xml")
            for case in ElementTree.parse(report).iter("testcase")
        ),
        reverse=True,
    )


def main(folder: str) -> None:
    """Print the table."""
    times = read_times(Path(folder))
    print(f"{len(times)} tests, {sum(seconds for seconds, _ in times):.0f} s; the slowest:")
    for seconds, test in times[:NUM_SHOWN]:
        print(f"{seconds:8.2f} s  {test}")


if __name__ == "__main__":
    main(sys.argv[1])
