"""`gnomon bench serve` against a real server: every token is counted, failures are told apart."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gnomon.bench.serve import Answer, ServeResult, ServeSettings, _token_times, bench_serve
from gnomon.bench.startup import bench_startup, stages_of
from gnomon.errors import ConfigError, GnomonError

SMALL = {"input_len": 24, "output_len": 6}


def test_every_request_and_token_is_counted(server) -> None:
    settings = ServeSettings(num_requests=5, concurrency=3, **SMALL)
    seen: list[int] = []
    result = bench_serve(server.url, "", settings, on_done=seen.append)
    assert [answer.error for answer in result.answers] == [""] * 5
    assert [answer.num_tokens for answer in result.answers] == [6] * 5
    assert sorted(seen) == [1, 2, 3, 4, 5]
    assert all(answer.ttft_ms > 0 for answer in result.good)
    rates = result.rates()
    assert rates["output_tokens_s"] == pytest.approx(30 / result.seconds)
    assert rates["total_tokens_s"] == pytest.approx((30 + 5 * 24) / result.seconds)
    server.wait_until_idle()


def test_arrivals_at_a_rate_are_spread_out(server) -> None:
    settings = ServeSettings(num_requests=4, concurrency=4, request_rate=20.0, **SMALL)
    sent = [answer.sent for answer in bench_serve(server.url, "", settings).answers]
    assert sent == sorted(sent)
    assert len(set(sent)) == 4
    server.wait_until_idle()


def test_a_refusal_is_an_answer_with_its_reason(server) -> None:
    settings = ServeSettings(num_requests=1, concurrency=1, input_len=600, output_len=6)
    (answer,) = bench_serve(server.url, "", settings).answers
    assert answer.error.startswith("HTTP 400")


def test_goodput_counts_requests_that_keep_both_bounds() -> None:
    answers = (
        Answer(0.0, (0.1, 0.2, 0.3), 3),
        Answer(0.0, (5.0, 5.1), 2),
        Answer(0.0, (0.1, 9.1), 2),
        Answer(0.0, error="HTTP 500"),
    )
    settings = ServeSettings(slo_ttft_ms=1000, slo_tpot_ms=500)
    result = ServeResult(settings, answers, 2.0)
    assert result.rates()["goodput_requests_s"] == 0.5
    assert result.rates()["requests_s"] == 1.5
    assert result.percentiles()["ttft_ms"]["p99"] == pytest.approx(5000)


def test_no_server_and_no_url_are_told_apart() -> None:
    settings = ServeSettings(num_requests=1)
    with pytest.raises(GnomonError, match="is a server running there"):
        bench_serve("http://127.0.0.1:9", "", settings)
    with pytest.raises(ConfigError, match="http://host:port"):
        bench_serve("ftp://x", "", settings)


def test_the_command_writes_table_json_and_picture(server, tmp_path) -> None:
    command = [sys.executable, "-c", "from gnomon.cli.main import main; main()", "bench", "serve"]
    command += ["--url", server.url, "--num-requests", "2", "--input-len", "9"]
    command += ["--output-len", "3", "--json", str(tmp_path / "serve.json")]
    command += ["--picture", str(tmp_path / "serve.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "ttft_ms" in done.stdout
    assert "2 of 2 answered" in done.stdout
    assert len(json.loads((tmp_path / "serve.json").read_text())["answers"]) == 2
    assert (tmp_path / "serve.png").stat().st_size > 1000


def test_events_without_text_count_if_they_hold_tokens() -> None:
    lines = [
        b'data: {"choices": [{"text": "", "token_ids": [99999]}]}',
        b'data: {"choices": [{"text": "a"}]}',
        b'data: {"choices": [{"text": ""}]}',
        b'data: {"choices": [], "usage": {"completion_tokens": 3}}',
        b"data: [DONE]",
    ]
    arrivals, counted = _token_times(lines, 0.0)
    assert (len(arrivals), counted) == (2, 3)


def test_stages_are_read_from_the_log() -> None:
    log = "loading x\n  weights 50% 1 of 2 MiB at 0.5 s\n  weights 100% 2 of 2 MiB at 1.0 s\nINFO\n"
    log += "  graphs 100% 19 of 19 at 7.3 s\n  prefill graphs 100% 4 of 4 at 9.9 s\n"
    assert stages_of(log) == (("weights", 1.0), ("graphs", 7.3), ("prefill graphs", 9.9))


def test_startup_is_timed_cold_and_warm() -> None:
    model = ["random:deepseek_v32,layers=1", "--num-kv-pages", "20", "--max-model-len", "256"]
    times = list(bench_startup(model))
    assert [taken.kind for taken in times] == ["cold", "warm"]
    assert all(0 < taken.healthy_s < taken.first_answer_s for taken in times)


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(GnomonError, match="no-such-model"):
        list(bench_startup(["no-such-model"]))
