"""--record: chosen steps, failing steps, and nothing at all when it is off."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.providers.reference import PROVIDER as REFERENCE
from gnomon.attention.providers.torch import PROVIDER as TORCH
from gnomon.attention.recording_file import read_recording
from gnomon.attention.recording_replay import replay
from gnomon.engine.config import EngineConfig
from gnomon.engine.record import MAX_KEPT, RecordRules, parse_steps
from gnomon.errors import ConfigError
from tests.engine.planted import planted_core
from tests.engine.tiny_engine import outputs, prompt, request, run, tiny_core

REQUESTS = [request("a", prompt(20, 1), 5), request("b", prompt(50, 2), 5)]


@pytest.fixture(scope="module")
def tokens():
    return outputs(tiny_core(), REQUESTS)


class Breaks:
    """The torch kernel of an operator; its calls number at .. stop - 1 of a run are spoiled."""

    def __init__(self, op, at, spoil, stop=10**9):
        self.op, self.at, self.stop, self.spoil, self.num_calls = op, at, stop, spoil, 0

    def __call__(self, *arguments):
        result = TORCH.kernels[self.op](*arguments)
        self.num_calls += 1
        return self.spoil(result) if self.at <= self.num_calls < self.stop else result


def raise_luck(_):
    raise RuntimeError("out of luck")


def test_off_means_that_nobody_is_between_core_and_runner(tmp_path):
    core = tiny_core()
    assert core._parts.witness is None
    assert core._parts.runner._ops.kernels == TORCH.kernels
    core.close()


def test_recording_changes_no_token(tmp_path, tokens):
    core = tiny_core(record=str(tmp_path / "r"), record_steps="1..3")
    assert outputs(core, REQUESTS) == tokens
    steps = [read_recording(path).step.step_id for path in sorted((tmp_path / "r").iterdir())]
    assert steps == [1, 2, 3]


def test_steps_are_given_as_one_as_a_range_or_as_failures():
    assert parse_steps("12") == range(12, 13)
    assert parse_steps(" 12..15 ") == range(12, 16)
    assert len(parse_steps("on-failure")) == 0
    for bad in ("", "x", "5..", "..5", "7..5", "1-3", "-1", "1.5", "9" * 40):
        with pytest.raises(ConfigError, match="record_steps is"):
            parse_steps(bad)


@pytest.mark.parametrize("flags", [{"record_steps": "3"}, {"redact": True}])
def test_flags_that_need_a_folder_are_refused_without_one(flags):
    with pytest.raises(ConfigError, match="but record is not given"):
        RecordRules.of(EngineConfig.of(**flags))


def test_the_folder_is_checked_before_the_model_is_loaded(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        tiny_core(record=str(tmp_path / "open"))


def test_a_step_that_raises_is_recorded_and_named(tmp_path):
    """Seven calls of sparse_mla in, in layer 0 of step 4: two layers a step."""
    breaks = Breaks("sparse_mla", 7, raise_luck)
    core = planted_core({"sparse_mla": breaks}, record=str(tmp_path / "r"))
    core.add(REQUESTS)
    for _ in range(3):
        core.step()
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        core.step()
    assert caught.value.__notes__ == ["in step 4"]
    (path,) = (tmp_path / "r").iterdir()
    assert path.name.endswith("-step-4-failed.safetensors")
    recording = read_recording(path)
    assert (recording.reason, recording.error) == ("failed", "RuntimeError: out of luck")
    assert recording.step.step_id == 4
    assert [call.error for call in recording.calls if call.error] == ["RuntimeError: out of luck"]
    assert (recording.calls[-1].op, recording.calls[-1].layer) == ("sparse_mla", 0)
    report = replay(recording, REFERENCE)
    assert report.first is None
    assert report.calls[-1].recorded_error == "RuntimeError: out of luck"


def test_a_fault_that_does_not_repeat_is_recorded_as_such(tmp_path):
    class Once(Breaks):
        def __call__(self, *arguments):
            self.num_calls += 1
            if self.num_calls == self.at:
                raise RuntimeError("a passing cloud")
            return TORCH.kernels[self.op](*arguments)

    core = planted_core({"topk": Once("topk", 1, None)}, record=str(tmp_path / "r"))
    core.add([request("a", prompt(40, 1), 5)])
    with pytest.raises(RuntimeError, match="a passing cloud"):
        core.step()
    (path,) = (tmp_path / "r").iterdir()
    recording = read_recording(path)
    assert recording.error == (
        "RuntimeError: a passing cloud (recorded in a second run, which gave: no error)"
    )
    assert replay(recording, TORCH).first is None


def test_a_request_with_nan_is_recorded_and_its_mates_go_on(tmp_path, tokens):
    """NaN in the attention of request a's rows: its logits hold NaN, those of b do not."""

    def spoil(result):
        out, lse = result
        spoiled = out.clone()
        spoiled[0] = torch.nan  # the first row of a step is a's
        return spoiled, lse

    breaks = Breaks("sparse_mla", 5, spoil, stop=9)  # both runs of step 3
    core = planted_core({"sparse_mla": breaks}, record=str(tmp_path / "r"))
    found = run(core, REQUESTS)
    assert found["a"][-1].finish_reason == "error"
    assert [token for delta in found["b"] for token in delta.token_ids] == tokens["b"]
    (path,) = (tmp_path / "r").iterdir()
    recording = read_recording(path)
    assert recording.error.startswith("NumericsError: an index score of this request was NaN")
    difference = replay(recording, REFERENCE).first
    assert (difference.op, difference.layer, difference.comparison.first.row) == (
        "sparse_mla",
        0,
        0,
    )


def test_a_fault_in_every_step_does_not_fill_the_disk(tmp_path):
    core = planted_core({"topk": Breaks("topk", 1, raise_luck)}, record=str(tmp_path / "r"))
    for number in range(MAX_KEPT["failed"] + 3):
        core.add([request(f"r{number}", prompt(40, number), 2)])
        with pytest.raises(RuntimeError, match="out of luck"):
            core.step()
        core.abort_all()
    assert len(list((tmp_path / "r").iterdir())) == MAX_KEPT["failed"]


def test_a_folder_that_vanished_costs_the_recording_only(tmp_path, tokens, caplog):
    core = tiny_core(record=str(tmp_path / "r"), record_steps="1")
    (tmp_path / "r").rmdir()
    assert outputs(core, REQUESTS) == tokens
    assert "step 1 could not be recorded" in caplog.text


def test_a_failed_step_of_the_past_does_not_disturb_what_comes(tmp_path, tokens):
    """The second run of a failed step writes what the first wrote: later requests see nothing."""
    breaks = Breaks("sparse_mla", 3, raise_luck)
    core = planted_core({"sparse_mla": breaks}, record=str(tmp_path / "r"))
    core.add([request("x", prompt(30, 7), 5)])
    core.step()
    with pytest.raises(RuntimeError, match="out of luck"):
        core.step()
    core.abort_all()
    breaks.at = 10**9
    core.check_integrity()
    assert outputs(core, REQUESTS) == tokens


@pytest.mark.parametrize("steps", ["on-failure", "1..9"])
def test_what_checked_mode_finds_is_recorded_with_what_the_kernel_gave(tmp_path, steps):
    """A kernel that gives the lse in base 2: the recording holds its lie, and the check's words."""

    def base_2(*arguments):
        out, lse = TORCH.kernels["sparse_mla"](*arguments)
        return out, lse / 0.6931471805599453

    core = planted_core(
        {"sparse_mla": base_2}, record=str(tmp_path / "r"), record_steps=steps, check="full"
    )
    found = run(core, [request("a", prompt(20, 1), 3)])
    assert "lse is the natural log" in found["a"][-1].error
    num_violations = core.stats().check_violations
    assert num_violations == 1
    path = next((tmp_path / "r").glob("*-failed.safetensors"))
    recording = read_recording(path)
    assert recording.error.startswith("NumericsError: sparse_mla of provider 'torch' in layer 0")
    first = replay(recording, REFERENCE).first
    assert (first.op, first.layer, first.comparison.first.name) == ("sparse_mla", 0, "lse")


def test_chosen_steps_are_checked_like_all_others(tmp_path):
    plain, recorded = (
        tiny_core(check="full", **flags)
        for flags in ({}, {"record": str(tmp_path / "r"), "record_steps": "1..99"})
    )
    assert outputs(plain, REQUESTS) == outputs(recorded, REQUESTS)
    assert recorded.stats().checks == plain.stats().checks > 0
    for path in (tmp_path / "r").iterdir():
        calls = read_recording(path).calls
        assert {call.layer for call in calls} == {0, 1}
        assert replay(read_recording(path), TORCH).first is None
