"""What the driver cannot do is found before weights, and said with what is used instead."""

from __future__ import annotations

import pytest
import torch

from gnomon.engine import assembly, device_probe
from gnomon.engine.config import EngineConfig
from gnomon.engine.device_probe import Probed, probe_driver
from gnomon.engine.machine import GIB, Machine, shortcomings
from gnomon.errors import ConfigError

H200 = Machine("cuda", 100 * GIB, 140 * GIB, "H200", (9, 0))


def fails(error: Exception):
    def trial() -> None:
        raise error

    return trial


def fine() -> None:
    """A trial that finds nothing."""


IMAGE = fails(RuntimeError("device kernel image is invalid\nsecond line"))


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_driver_that_can_do_all_changes_nothing():
    assert probe_driver(EngineConfig(), H200, {"kernel": fine, "graph": fine}) == Probed(H200)
    assert Probed(H200).words() == []


def test_a_gpu_on_which_triton_starts_nothing_is_passed_over_and_it_is_said():
    found = probe_driver(EngineConfig(), H200, {"kernel": IMAGE, "graph": fine})
    assert found.machine.device == "cpu"
    (said,) = shortcomings(found.machine)
    for word in ("CPU is used", "H200", "RuntimeError: device kernel image is invalid"):
        assert word in said
    assert "second line" not in said


def test_a_gpu_that_others_have_filled_is_not_passed_over():
    full = fails(torch.OutOfMemoryError("CUDA out of memory"))
    assert probe_driver(EngineConfig(), H200, {"kernel": full, "graph": full}) == Probed(H200)


def test_it_is_refused_where_the_gpu_was_asked_for():
    with pytest.raises(ConfigError, match=r"no kernel on H200: RuntimeError: device.*--device cpu"):
        probe_driver(EngineConfig(device="cuda"), H200, {"kernel": IMAGE, "graph": fine})


def test_a_driver_without_captures_runs_eagerly_and_says_so():
    trials = {"kernel": fine, "graph": IMAGE}
    found = probe_driver(EngineConfig(), H200, trials)
    assert found.machine == H200
    (said,) = found.words()
    assert "image is invalid): every step runs eagerly" in said
    with pytest.raises(ConfigError, match="max_captured_prefill_tokens is 64"):
        probe_driver(EngineConfig(max_captured_prefill_tokens=64), H200, trials)
    assert probe_driver(EngineConfig(enforce_eager=True), H200, trials).words() == []


def test_why_triton_is_absent_is_the_reason(monkeypatch):
    class Absent:
        def supports(self, op, need):
            return type("Verdict", (), {"reason": "needs a C compiler"})

    monkeypatch.setattr(device_probe, "absent_providers", lambda: (Absent(),))
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        device_probe.launch_a_kernel()


def test_a_cpu_has_nothing_to_try():
    trials = {"kernel": fails(AssertionError()), "graph": fails(AssertionError())}
    machine = Machine("cpu", GIB)
    assert probe_driver(EngineConfig(), machine, trials) == Probed(machine)


@pytest.mark.parametrize("has_graphs", [True, False])
def test_the_survey_heeds_it(monkeypatch, has_graphs, caplog):
    """Decode is bound for capture only where the driver captures; said before weights are read."""
    seen = []
    why = "" if has_graphs else "RuntimeError: no"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(assembly, "probe_machine", lambda device: H200)
    monkeypatch.setattr(assembly, "probe_driver", lambda config, machine: Probed(machine, why))
    bind = assembly.bind_phases

    def bound(config, need, providers, is_captured, *rest):
        seen.append(is_captured)
        return bind(config, need, providers, is_captured, *rest)

    monkeypatch.setattr(assembly, "bind_phases", bound)
    assembly.survey(EngineConfig(model="random:deepseek_v32,layers=2"))
    assert seen == [has_graphs]
    assert ("every step runs eagerly" in caplog.text) is not has_graphs
