"""Files of `gnomon bench serve` and `startup`: checked before the work, drawn after it."""

from __future__ import annotations

import json
import os
import threading

from typer.testing import CliRunner

from gnomon.bench.result_files import write_json
from gnomon.bench.serve import Answer, ServeResult, ServeSettings
from gnomon.bench.serve_client import ClientLoad
from gnomon.bench.serving_pictures import draw_serve, draw_startup
from gnomon.bench.startup import StartupTime
from gnomon.cli.bench_serving import _lines
from gnomon.cli.main import build_app
from gnomon.errors import ConfigError


def test_files_are_checked_before_anybody_is_asked(tmp_path) -> None:
    """No server listens there and none is started: the answer is about the file."""
    for command in (["serve", "--url", "http://127.0.0.1:9"], ["startup"]):
        result = CliRunner().invoke(build_app(), ["bench", *command, "--picture", "x.xyz"])
        assert isinstance(result.exception, ConfigError)
        assert "has to end with one of .png" in str(result.exception)
        result = CliRunner().invoke(build_app(), ["bench", *command, "--json", str(tmp_path)])
        assert "it is a folder" in str(result.exception)


def test_a_start_is_drawn_with_its_stages(tmp_path) -> None:
    times = [
        StartupTime("cold", 40.0, 41.0, (("weights", 5.0), ("graphs", 30.0))),
        StartupTime("warm", 14.0, 14.5),
    ]
    draw_startup(times, tmp_path / "s.svg", "random:h128")
    drawn = (tmp_path / "s.svg").read_text()
    for word in ("cold", "warm", "weights", "graphs", "random:h128"):
        assert f"<!-- {word}" in drawn


def test_a_run_without_answers_is_drawn_too(tmp_path) -> None:
    result = ServeResult(ServeSettings(), (Answer(0.0, error="HTTP 500"),), 2.0)
    draw_serve(result, tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_nobody_is_called_a_bottleneck_where_nothing_was_answered() -> None:
    busy = ClientLoad(0.9, 0.95, 0.0)
    good = Answer(0.0, (0.1, 0.2), 2)
    for answers, is_said in (((Answer(0.0, error="HTTP 500"),), False), ((good,), True)):
        result = ServeResult(ServeSettings(), answers, 2.0, busy)
        assert any("bottleneck" in line for line in _lines(result)) is is_said


def test_json_is_written_to_a_pipe_or_a_link_and_leaves_it_one(tmp_path) -> None:
    """As to /dev/null and /dev/stdout: a file in their place would be found by everybody else."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join(10)
    assert json.loads(heard[0]) == {"a": 1}
    assert pipe.is_fifo()
    file.write_text("old")
    link.symlink_to(file)
    write_json(link, {"b": 2})
    assert link.is_symlink()
    assert json.loads(file.read_text()) == {"b": 2}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "link", "pipe"]
