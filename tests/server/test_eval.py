"""`gnomon eval` through a real server: the same questions, and the answers of the same model."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from gnomon.cli.main import build_app
from tests.server.conftest import LIMITS, MODEL, RunningServer

GRID = ["--lengths", "200,260", "--depths", "2", "--keys", "2", "--samples", "1"]


def report(path: Path, *arguments: str) -> dict:
    flags = [*GRID, "--answer-tokens", "6", "--json", str(path)]
    result = CliRunner().invoke(build_app(), ["eval", "needle", *arguments, *flags])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_server_answers_as_the_model_in_process(server: RunningServer, tmp_path: Path) -> None:
    remote = report(tmp_path / "remote", "--url", server.url, "--concurrency", "2")
    flags = [
        part
        for name, value in LIMITS.items()
        for part in (
            (f"--{name.replace('_', '-')}",)
            if value is True
            else (f"--{name.replace('_', '-')}", str(value))
        )
    ]
    local = report(tmp_path / "local", MODEL, *flags)
    assert (remote["model"], remote["place"]) == ("sundial", server.url)
    assert (local["model"], local["place"]) == (MODEL, "in process")
    assert remote["listed_share"] is None
    assert local["listed_share"] is not None
    seen = ("length", "depth", "question", "expected", "prompt_tokens", "answer")
    assert [[case[name] for name in seen] for case in remote["cases"]] == [
        [case[name] for name in seen] for case in local["cases"]
    ]
    assert remote["usage"]["prompt_tokens"] == local["usage"]["prompt_tokens"]
    server.wait_until_idle()
