"""--shadow: the share of steps, the bounded queue, the verdicts, and that no answer changes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from gnomon.attention.providers.torch import PROVIDER as TORCH
from gnomon.attention.recording_file import read_recording, to_bytes
from gnomon.engine.config import EngineConfig
from gnomon.engine.messages import ShadowOperator
from gnomon.engine.shadow import MAX_STARTS, MAX_WAITING, NUM_ROWS, Shadow, is_chosen
from gnomon.engine.shadow_worker import judge
from gnomon.errors import ConfigError
from tests.engine.planted import planted_core
from tests.engine.tiny_engine import outputs, prompt, request, tiny_core

REQUESTS = [
    request("a", prompt(20, 1), 8),
    request("b", prompt(90, 2), 8),
    request("c", prompt(33, 3), 8, temperature=1.0, seed=4),
]


@pytest.fixture(scope="module")
def tokens():
    return outputs(tiny_core(), REQUESTS)


@pytest.fixture
def recording(tmp_path):
    core = tiny_core(record=str(tmp_path / "r"), record_steps="2")
    outputs(core, [request("a", prompt(20, 1), 3)])
    (path,) = (tmp_path / "r").iterdir()
    return read_recording(path)


@pytest.fixture
def close_all():
    """Shadows and engines to close at the end, also of a test that failed."""
    opened = []
    yield opened.append
    for one in opened:
        one.close()


class HeldBack(Shadow):
    """A shadow whose process is this function: it waits for ``gate``, then answers."""

    def __init__(self, share, answer=None):
        self.gate = threading.Event()
        self.asked = []
        self.answer = answer or {"operators": {}, "late": 0, "first": ""}
        super().__init__(share)

    def _ask(self, data):
        self.asked.append(data)
        self.gate.wait(30)
        return self.answer


def test_the_share_of_steps_is_what_was_asked_for_and_always_the_same():
    steps = range(1, 100_001)
    for share in (0.001, 0.01, 0.25):
        chosen = [step for step in steps if is_chosen(step, share)]
        expected = share * len(steps)
        assert abs(len(chosen) - expected) < 5 * expected**0.5
        halves = sum(step <= 50_000 for step in chosen), sum(step > 50_000 for step in chosen)
        assert min(halves) > 0.3 * len(chosen)
        even = sum(step % 2 == 0 for step in chosen)
        assert 0.3 < even / len(chosen) < 0.7  # no pattern of steps is passed over
    assert all(is_chosen(step, 1.0) for step in steps[:100])
    assert not any(is_chosen(step, 0.0) for step in steps[:100])


@pytest.mark.parametrize("share", [-0.1, 1.5, "much"])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(ConfigError, match="shadow is"):
        EngineConfig.of(shadow=share)


def test_no_token_changes_and_every_operator_is_looked_at(tokens, close_all):
    core = tiny_core(shadow=1.0)
    close_all(core)
    assert outputs(core, REQUESTS) == tokens
    core._parts.witness._shadow.wait()
    found = core.stats().shadow
    assert found.steps >= 2
    assert found.steps + found.dropped == core.stats().num_steps
    assert found.errors == found.late_calls == 0
    assert {"sparse_mla", "topk", "index_scores", "latent_write"} <= found.operators.keys()
    for one in found.operators.values():
        assert one.cases > 0
        assert one.differing == 0
        assert one.worst_share < 0.5


def test_it_copies_few_rows(tokens, close_all):
    core = tiny_core(shadow=1.0)
    close_all(core)
    seen = []
    shadow = core._parts.witness._shadow
    shadow.offer = seen.append
    outputs(core, REQUESTS)
    assert len(seen) == core.stats().num_steps
    prefill = seen[0]
    rows = [call.rows["R"].shape[0] for call in prefill.calls if "R" in call.rows]
    assert prefill.step.geometry.rows.num_live == 143
    assert max(rows) == NUM_ROWS


def test_a_wrong_provider_shows_in_its_operator_alone(tmp_path, tokens, close_all, caplog):
    def a_little_off(*arguments):
        out, lse = TORCH.kernels["sparse_mla"](*arguments)
        return out * 1.001, lse

    core = planted_core({"sparse_mla": a_little_off}, shadow=1.0, record=str(tmp_path / "r"))
    close_all(core)
    outputs(core, REQUESTS)
    core._parts.witness._shadow.wait()
    found = core.stats().shadow.operators
    assert found["sparse_mla"].differing == found["sparse_mla"].cases
    assert found["sparse_mla"].worst_share > 10
    assert found["sparse_mla"].worst_difference > 1e-4
    assert {name for name, one in found.items() if one.differing} == {"sparse_mla"}
    assert "shadow: step" in caplog.text
    assert "sparse_mla, layer 0, row 0 (request 'a', position" in caplog.text
    kept = read_recording(next((tmp_path / "r").glob("*-shadow.safetensors")))
    assert kept.reason == "shadow"


def test_one_that_is_behind_lets_go_counts_and_never_waits(tokens, close_all):
    """While nothing is compared, steps are copied only as long as there is room to wait."""
    core = tiny_core(shadow=1.0)
    close_all(core)
    real = core._parts.witness._shadow
    held = HeldBack(1.0)
    core._parts.witness._shadow = held
    real.close()
    assert outputs(core, REQUESTS) == tokens  # the engine went through with the gate shut
    num_steps = core.stats().num_steps
    taken = num_steps - held.stats().dropped
    assert MAX_WAITING <= taken <= MAX_WAITING + 1  # one in work, the others wait
    held.gate.set()
    held.wait()
    assert held.stats().steps == taken
    assert len(held.asked) == taken
    assert held.wants(1)


def test_verdicts_add_up(recording, close_all):
    answer = {"operators": {"topk": [3, 1, 2.0, 5.0]}, "late": 4, "first": "topk is off"}
    shadow = HeldBack(1.0, answer)
    close_all(shadow)
    shadow.gate.set()
    for _ in range(3):
        shadow.offer(recording)
        shadow.wait()
    found = shadow.stats()
    assert (found.steps, found.late_calls, found.dropped, found.errors) == (3, 12, 0, 0)
    assert found.operators == {
        "topk": ShadowOperator(cases=9, differing=3, worst_difference=2.0, worst_share=5.0)
    }


def test_a_process_that_dies_is_counted_and_started_anew(recording, close_all, caplog):
    shadow = Shadow(1.0)
    close_all(shadow)
    shadow.offer(recording)
    shadow.wait()
    assert shadow.stats().steps == 1
    shadow._process.kill()
    shadow._process.wait()
    for _ in range(2):
        shadow.offer(recording)
        shadow.wait()
    assert (shadow.stats().steps, shadow.stats().errors) == (2, 1)
    shadow._num_starts = MAX_STARTS
    shadow._process.kill()
    shadow._process.wait()
    for _ in range(2):
        shadow.offer(recording)
        shadow.wait()
    assert (shadow.stats().steps, shadow.stats().errors) == (2, 3)
    assert "is given up" in caplog.text


def test_the_worker_keeps_its_time_and_begins_elsewhere_each_time(recording):
    """Without time it does one call; over many steps every call is the one."""
    whole = judge(to_bytes(recording), 60.0)
    assert whole["late"] == 0
    assert sum(cases for cases, *_ in whole["operators"].values()) == len(recording.calls)
    seen = set()
    for step_id in range(1, 3 * len(recording.calls)):
        step = replace(recording.step, step_id=step_id)
        short = judge(to_bytes(replace(recording, step=step)), -1.0)
        assert short["late"] == len(recording.calls) - 1
        seen |= short["operators"].keys()
    assert seen == {call.op for call in recording.calls}


def test_it_runs_at_the_lowest_priority_and_ends_with_the_engine(recording, close_all):
    shadow = Shadow(1.0)
    shadow.offer(recording)
    shadow.wait()
    process = shadow._process
    with open(f"/proc/{process.pid}/stat") as file:
        nice = int(file.read().rpartition(")")[2].split()[16])
    assert nice == 19
    shadow.close()
    shadow.close()
    assert process.returncode is not None
    assert not shadow.wants(1)
    assert torch.is_inference_mode_enabled() is False
