"""Kernels under Triton's interpreter, in a process whose other tests know nothing of it.

In:  this folder, collected before anything in the process has imported triton.
Out: triton and all modules with kernels, imported once with TRITON_INTERPRET=1, which is taken
     back at once: builtin_providers() and subprocesses stay as they are without it.
Rules for tests here: import kernels from gnomon.attention.providers.triton, which is imported
     below; compile ahead of time in a subprocess only (ahead_of_time.py): the flag breaks it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator

import numpy as np
import pytest

if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    held = getattr(sys.modules.get("triton.language.standard"), "zeros", None)
    if type(held).__name__ != "InterpretedFunction":
        raise pytest.UsageError(
            "triton was imported without TRITON_INTERPRET=1 before tests/unit/triton was "
            "collected; run that folder by itself"
        )

_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    import triton.experimental.gluon  # noqa: F401  # else the first launch would, without the flag

    from gnomon.attention.providers import triton as provider
    from gnomon.attention.providers.triton import interpreter

    for found in pkgutil.iter_modules(provider.__path__, f"{provider.__name__}."):
        importlib.import_module(found.name)
    for name in ("sampling_edges_triton", "sampling_triton", "step_checks_triton"):
        importlib.import_module(f"gnomon.engine.{name}")
    importlib.import_module("gnomon.attention.providers.external.launches")
    from tests.unit.triton import probes  # noqa: F401
finally:
    if _before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = _before

interpreter.repair()


@pytest.fixture(autouse=True)
def silent_arithmetic() -> Iterator[None]:
    """Overflow and NaN inside a kernel are no warnings: a GPU gives none."""
    with np.errstate(all="ignore"):
        yield
