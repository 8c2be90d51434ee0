"""One recorded run for all tests of recordings: they only read it."""

from __future__ import annotations

import pytest

from gnomon.attention.recording_file import read_recording
from tests.unit.recording.recorded import record


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Step 1 (three prompts at once) and step 2 (three decodes)."""
    return record(tmp_path_factory.mktemp("steps") / "own")


@pytest.fixture(scope="session")
def prefill(files):
    return read_recording(files[0])


@pytest.fixture(scope="session")
def decode(files):
    return read_recording(files[1])
