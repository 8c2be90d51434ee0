"""Tests that need a GPU: deselected where there is none.

In:  `pytest tests/gpu` on a machine with CUDA; elsewhere nothing of this folder runs.
Out: kernels compiled once into one cache; memory given back after each test, so that a large test
     does not starve the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = [item for item in items if item.get_closest_marker("gpu") is not None]
    if here:
        config.hook.pytest_deselected(items=here)
        items[:] = [item for item in items if item not in here]


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Blocks that a test freed go back to the device."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
