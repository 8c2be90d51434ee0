"""An error that takes the device with it: the step is named, written down and not run again there.

In another process it can be done again, from what was written down.
"""

from __future__ import annotations

import json
import stat

import pytest
import torch
from typer.testing import CliRunner

from gnomon.cli.main import build_app
from gnomon.engine.assembly import assemble
from gnomon.engine.lost_step import again, config_for, read_lost_step
from gnomon.engine.step_checks import is_device_error
from gnomon.errors import ConfigError
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


def lost_by(core, error=None):
    """Let the next step of an engine take the device with it; the logits that it would have had."""
    run, kept = core._parts.runner.run, []

    def lose(*args, **named):
        kept.append(run(*args, **named).logits.clone())
        raise error or torch.AcceleratorError(LOSS)

    core._parts.runner.run = lose
    with pytest.raises(RuntimeError):
        core.step()
    core._parts.runner.run = run
    return kept[0]


def replayed(path, **changes):
    """(logits of the step, faults) in a fresh engine."""
    lost = read_lost_step(path)
    parts = assemble(config_for(lost, None, changes), lambda *_: None, lost.vocab_size)
    run, kept = parts.runner.run, []

    def keeping(*args, **named):
        output = run(*args, **named)
        kept.append(output.logits.clone())
        return output

    parts.runner.run = keeping
    return again(lost, parts, lambda *_: None), kept[-1]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_lost_step_can_be_done_again_elsewhere(tmp_path, num_steps):
    """Chunked prompts of which one shares a prefix, then decode: the logits are those of then."""
    core = tiny_core(record=str(tmp_path / "r"), max_num_batched_tokens=48, max_num_seqs=4)
    core.add([request("a", prompt(70), 9), request("b", prompt(20, 1), 9)])
    for _ in range(num_steps):
        core.step()
    core.add([request("c", prompt(60), 9)])
    expected = lost_by(core)
    (path,) = (tmp_path / "r").iterdir()
    faults, logits = replayed(path)
    assert faults == {}
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_command_tells_whether_it_fails_again(tmp_path):
    core = tiny_core(record=str(tmp_path / "r"))
    core.add([request("a", prompt(30), 9)])
    core.step()
    lost_by(core)
    (path,) = (tmp_path / "r").iterdir()
    runner, app = CliRunner(), build_app()
    done = runner.invoke(app, ["replay", str(path), "--device", "cpu", "--provider", "torch"])
    assert done.exit_code == 0, done.output
    assert f"step 2: AcceleratorError: {LOSS}" in done.stdout
    assert "it ran to its end" in done.stdout
    assert "checks of operators" in done.stdout
    facts = json.loads(path.read_text())
    facts["requests"][0]["tokens"][3] = 10**6  # outside of the vocabulary: the step cannot be run
    path.write_text(json.dumps(facts))
    done = runner.invoke(app, ["replay", str(path), "--json", "--check", "off"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]


def test_what_cannot_be_done_again_is_refused(tmp_path):
    core = tiny_core(record=str(tmp_path / "r"), redact=True)
    core.add([request("a", prompt(30), 9)])
    lost_by(core)
    (path,) = (tmp_path / "r").iterdir()
    with pytest.raises(ConfigError, match="--redact"):
        read_lost_step(path)
    path.write_text('{"step": 1}')
    with pytest.raises(ConfigError, match="no lost step"):
        read_lost_step(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_lost_step(tmp_path / "none-lost.json")
    app, words = build_app(), ["replay", str(tmp_path / "x.safetensors"), "--check", "full"]
    assert "--check is for" in str(CliRunner().invoke(app, words).exception)


def test_a_damaged_file_is_refused_before_a_model_is_loaded(tmp_path):
    core = tiny_core(record=str(tmp_path / "r"))
    core.add([request("a", prompt(30), 9)])
    lost_by(core)
    (path,) = (tmp_path / "r").iterdir()
    facts = json.loads(path.read_text())
    assert read_lost_step(path).step_id == facts["step"]
    (known,) = facts["requests"]
    for name in known:
        rest = {key: value for key, value in known.items() if key != name}
        path.write_text(json.dumps({**facts, "requests": [rest]}))
        with pytest.raises(ConfigError, match=rf"no lost step.*KeyError: '{name}'"):
            read_lost_step(path)
    for change in ({"format": "other"}, {"requests": [5]}, {"groups": ["other"]}):
        path.write_text(json.dumps({**facts, **change}))
        with pytest.raises(ConfigError, match="no lost step"):
            read_lost_step(path)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_librarys_own_error_asks_the_device(monkeypatch, is_lost):
    """Triton raises RuntimeError; a device that is lost says so whenever it is asked."""

    def synchronize():
        if is_lost:
            raise torch.AcceleratorError(LOSS)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert is_device_error(error) is is_lost
    assert is_device_error(torch.AcceleratorError(LOSS))
    assert not is_device_error(ValueError("no"))


def test_a_lost_device_is_not_run_on_again_whoever_says_it(tmp_path, monkeypatch):
    def synchronize():
        raise torch.AcceleratorError(LOSS)

    core = tiny_core(record=str(tmp_path / "r"))
    core.add([request("a", prompt(30), 9)])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    lost_by(core, RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    (path,) = (tmp_path / "r").iterdir()
    assert path.name.endswith("step-1-lost.json")
