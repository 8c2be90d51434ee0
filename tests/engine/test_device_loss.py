"""An error that takes the device with it: the step is named, written down and not run again."""

from __future__ import annotations

import json
import stat

import pytest
import torch

from tests.engine.tiny_engine import prompt, request, tiny_core

LOSS = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("is_redacted", [False, True])
def test_what_the_host_knows_is_written_down_and_the_step_is_not_run_again(tmp_path, is_redacted):
    folder = tmp_path / "records"
    core = tiny_core(record=str(folder), redact=is_redacted)
    core.add([request("a", prompt(30), 9), request("b", prompt(20, 1), 9)])
    core.step()
    runs = []

    def lose(*_, **__):
        runs.append(1)
        raise torch.AcceleratorError(LOSS)

    core._parts.runner.run = lose
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        core.step()
    assert caught.value.__notes__ == ["in step 2"]
    assert len(runs) == 1
    (path,) = folder.iterdir()
    assert path.name.endswith("step-2-lost.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    facts = json.loads(path.read_text())
    assert LOSS in facts["error"]
    first, second = facts["requests"]
    assert (first["num_computed"], second["num_computed"]) == (30, 20)
    assert len(first["pages"]["tokens"]) >= 2
    if is_redacted:
        assert first["tokens"] is None
        assert first["request_id"] == 0
    else:
        assert first["tokens"][:30] == prompt(30)
        assert first["request_id"] == "a"


def test_other_errors_are_recorded_for_replay(tmp_path):
    folder = tmp_path / "records"
    core = tiny_core(record=str(folder))
    core.add([request("a", prompt(30), 9)])
    run = core._parts.runner.run
    calls = []

    def fail_once(*args, **named):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return run(*args, **named)

    core._parts.runner.run = fail_once
    with pytest.raises(RuntimeError, match="planted"):
        core.step()
    (path,) = folder.iterdir()
    assert "failed" in path.name
