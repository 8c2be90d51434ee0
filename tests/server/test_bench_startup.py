"""`gnomon bench startup` times a real server's start, stage by stage."""

from __future__ import annotations

import pytest

from gnomon.bench.startup import bench_startup, stages_of
from gnomon.errors import ConfigError, GnomonError


def test_stages_are_read_from_the_log() -> None:
    log = "loading x\n  weights 50% 1 of 2 MiB at 0.5 s\n  weights 100% 2 of 2 MiB at 1.0 s\nINFO\n"
    log += "  graphs 100% 19 of 19 at 7.3 s\n  prefill graphs 100% 4 of 4 at 9.9 s\n"
    log += "  kernels of warm-up 100% at 11.5 s\nloaded x in 12.0 s\n"
    assert stages_of(log) == (
        ("weights", 1.0),
        ("graphs", 7.3),
        ("prefill graphs", 9.9),
        ("kernels of warm-up", 11.5),
        ("loaded", 12.0),
    )


@pytest.mark.parametrize("argument", ["--port", "--host=0.0.0.0", "--api-key"])
def test_arguments_that_startup_sets_itself_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"{argument} is among .* Leave --host, --port"):
        next(bench_startup(["random:deepseek_v32", argument, "9"]))


def test_startup_is_timed_cold_and_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_API_KEY", "of somebody else")
    model = ["random:deepseek_v32,layers=1", "--num-kv-pages", "20", "--max-model-len", "256"]
    times = list(bench_startup(model))
    assert [taken.kind for taken in times] == ["cold", "warm"]
    assert all(0 < taken.healthy_s < taken.first_answer_s for taken in times)
    for taken in times:
        names, seconds = zip(*taken.stages, strict=True)
        assert names == ("engine process", "device", "random weights", "loaded")
        assert list(seconds) == sorted(seconds)
        assert seconds[0] > 0
        assert seconds[-1] <= taken.healthy_s


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(GnomonError, match="no-such-model"):
        list(bench_startup(["no-such-model"]))
