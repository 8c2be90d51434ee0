"""Tests that need a GPU: deselected where there is none.

In:  `pytest tests/gpu` on a machine with CUDA; elsewhere nothing of this folder runs.
Out: kernels compiled once into one cache; memory given back after each test, so that a large test
     does not starve the next one; slow tests first. A failure is named as soon as it is known, with
     what is wrong, and in $OUT/failures.txt where OUT is set: a run that is cut off loses no name.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

WIDEST = 300  # characters of a line
MUCH = 1 << 30  # bytes that a test left behind
SLOW = (
    "[wide fp8]",
    "test_deterministic.py::test_the_bits",
    "test_no_late_compile.py",
    "test_trained.py",
    "test_prefill_graphs.py",
    "test_device_loss.py",
    "test_engine.py::test_steps_and_graphs",
    "test_engine.py::test_fp8_weights",
    "test_launches.py",
    "test_bugs.py",
)
"""Names of tests that take half a minute with a cold kernel cache, the longest first."""


class FailureLines:
    """Names failures at once. Lives in the process that prints, not in xdist's workers."""

    def __init__(self, config: pytest.Config, folder: str | None) -> None:
        self._config = config
        self._file = None if folder is None else Path(folder) / "failures.txt"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line for a test that failed, or whose set-up or end did."""
        if not report.failed:
            return
        stage = "" if report.when == "call" else f" in {report.when}"
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        text = f"FAILED AT ONCE {report.nodeid}{stage}: {' '.join(lines[:3])}"[:WIDEST]
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.line("")
            terminal.write_line(text)
            terminal.flush()
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailureLines(config, os.environ.get("OUT")), "gpu-failures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not torch.cuda.is_available():
        if here:
            config.hook.pytest_deselected(items=here)
            items[:] = [item for item in items if item not in here]
        return
    others = [item for item in items if item not in here]
    items[:] = [*others, *in_good_order(here)]


def in_good_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """The slow ones first, a quick one behind each, so that no worker begins with two."""
    ranks = {item: slowness(item.nodeid) for item in items}
    slow = sorted((item for item in items if ranks[item] < len(SLOW)), key=ranks.__getitem__)
    quick = [item for item in items if ranks[item] == len(SLOW)]
    pairs = zip_longest(slow, quick)
    return [item for pair in pairs for item in pair if item is not None]


def slowness(name: str) -> int:
    """The place in SLOW of the first words that a test's name holds."""
    return next((place for place, words in enumerate(SLOW) if words in name), len(SLOW))


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Blocks that a test freed go back to the device."""
    yield
    if torch.cuda.is_available():
        if torch.cuda.memory_allocated() > MUCH:  # an engine may hang in a cycle of references
            gc.collect()
        torch.cuda.empty_cache()
