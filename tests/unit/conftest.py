"""tests/unit/triton has a run of its own: `pytest tests/unit/triton` (`make test` does both).

Triton decides when it is imported whether kernels are interpreted. That folder needs it so, other
tests import Triton without, and one process can do only one of the two.
"""

from __future__ import annotations

from pathlib import Path

import pytest

APART = "triton"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_asked_for = any(APART in argument for argument in config.args)
    return True if collection_path.name == APART and not is_asked_for else None
