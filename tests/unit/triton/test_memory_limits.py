"""The compile matrix refuses what the GPU that a kernel is compiled for could not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.triton.ahead_of_time import Report, faults

FITS = Report("kernel", 0, 128, 100_000, (), ())


@pytest.mark.parametrize(
    ("arch", "fits"), [(80, 166_912), (89, 101_376), (90, 232_448), (120, 101_376)]
)
def test_shared_memory_is_that_of_the_architecture(arch: int, fits: int) -> None:
    assert faults([replace(FITS, arch=arch, shared=fits)]) == []
    assert faults([replace(FITS, arch=arch, shared=fits + 1)]) == [
        f"kernel: {fits + 1} bytes of shared memory"
    ]
