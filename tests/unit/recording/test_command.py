"""`gnomon replay`: its exit codes, its words, its JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gnomon.cli.main import build_app
from gnomon.errors import ConfigError


@pytest.fixture
def run():
    app, runner = build_app(), CliRunner()

    def invoke(*words):
        return runner.invoke(app, ["replay", *map(str, words)])

    return invoke


WRONG = "tests.unit.recording.recorded:WRONG"


def test_equal_is_0_and_different_is_1(run, files):
    for provider in ("torch", "reference"):
        result = run(files[0], "--provider", provider)
        assert result.exit_code == 0, result.output
        assert "every call came out as recorded" in result.output
        assert f"calls by {provider}" in result.output
    result = run(files[0], "--provider", WRONG)
    assert result.exit_code == 1
    assert "first difference: sparse_mla, layer 0, row 5 (request 'first', position 5), head 2" in (
        result.output
    )


def test_json_holds_the_same(run, files):
    result = run(files[0], "--provider", WRONG, "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert found["file"] == str(files[0])
    assert found["recorded"]["step_id"] == 1
    first = found["first"]
    assert (first["operator"], first["layer"], first["row"], first["head"]) == (
        "sparse_mla",
        0,
        5,
        2,
    )
    assert first["difference"] == pytest.approx(0.01, rel=0.1)
    assert json.loads(run(files[1], "--json").output)["is_equal"] is True


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--provider", "hopper9"], "no provider is called 'hopper9'; there are reference, torch"),
        (["--provider", "no.such.module:X"], "cannot be taken from its module: No module named"),
        (["--provider", "json:dumps"], "cannot be taken from its module"),
        (["--device", "tpu"], "device is 'tpu'"),
    ],
)
def test_bad_words_are_refused(run, files, words, match):
    result = run(files[1], *words)
    assert isinstance(result.exception, ConfigError)
    assert match in str(result.exception)


def test_a_foreign_file_is_refused(run, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("nothing of the kind")
    result = run(path)
    assert isinstance(result.exception, ConfigError)
    assert "is no safetensors file" in str(result.exception)
