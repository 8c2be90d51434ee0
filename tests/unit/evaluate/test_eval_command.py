"""`gnomon eval`: the three commands on the small random model, their files, their refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gnomon.cli.eval_display import AskingDisplay
from gnomon.cli.main import build_app, main
from gnomon.evaluate import heat_map

MODEL = "random:deepseek_v32,layers=2"
SMALL = ["--num-kv-pages", "60", "--max-model-len", "600", "--dtype", "float32"]
NEEDLE = ["needle", MODEL, *SMALL, "--lengths", "160,200", "--depths", "2", "--keys", "2"]


@pytest.fixture
def problems(tmp_path: Path) -> list[str]:
    """Flags that name two problems and one example."""
    for name, questions in (("data", ("one?", "two?")), ("shots", ("three?",))):
        lines = [
            json.dumps({"question": q, "answer": "It is <<1+1=2>>2\n#### 2"}) for q in questions
        ]
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    return ["--data", str(tmp_path / "data"), "--shots", str(tmp_path / "shots")]


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(build_app(), ["eval", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize("command", ["needle", "gsm8k", "arithmetic"])
def test_help_has_examples(command: str) -> None:
    shown, _ = run(command, "--help")
    assert f"  gnomon eval {command}" in shown.split("Examples:")[1]
    for flag in ("--url", "--json", "--thinking", "--question-seed", "--max-num-seqs"):
        assert flag in shown


def test_needle_in_process(tmp_path: Path) -> None:
    report, picture = tmp_path / "needle.json", tmp_path / "needle.png"
    files = ["--json", str(report), "--picture", str(picture)]
    shown, progress = run(*NEEDLE, "--samples", "1", "--answer-tokens", "4", *files)
    assert f"needle: {MODEL}, in process" in shown
    assert "100%" in shown  # a depth
    assert "lists that held the needle, by layer: 0: " in shown
    assert "needle: 4 of 4 answered" in progress
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["evaluation"] == "needle"
    assert found["model"] == MODEL
    assert found["score"]["n"] == len(found["cases"]) == 4
    assert found["settings"]["lengths"] == "160,200"
    assert found["ask"]["question_seed"] == 0
    assert found["engine_flags"]["max_model_len"] == 600
    assert 0.0 <= found["listed_share"] <= 1.0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_gsm8k_in_process(problems: list[str], tmp_path: Path) -> None:
    report = tmp_path / "gsm8k.json"
    flags = ["--num-shots", "1", "--answer-tokens", "4", "--json", str(report)]
    shown, _ = run("gsm8k", MODEL, *SMALL, *problems, *flags)
    assert "strict (#### x)" in shown
    assert "1 shots" in shown
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["strict"]["n"] == 2
    assert found["usage"]["output_tokens"] <= 8


def test_arithmetic_in_process() -> None:
    flags = ["--num-sums", "7", "--answer-tokens", "3"]
    shown, _ = run("arithmetic", MODEL, *SMALL, *flags)
    assert "subtraction, 3-digit" in shown
    assert "21 output tokens" in shown
    assert "7 answers ended by length" in shown


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["needle", "--lengths", "12"], "lengths is '12'"),
        (["needle", "--depths", "1"], "depths is 1"),
        (["needle", "--json", "no/such/folder/x"], "no folder"),
        (["needle", "--picture", "no/such/folder/x.png"], "no folder"),
        (["needle", "--picture", "x.gif"], "has to end in"),
        (["needle", "--concurrency", "3"], "--max-num-seqs"),
        (["needle", "no/such/model"], "no/such/model"),
        (["needle", "--thinking", "maybe"], "thinking is 'maybe'"),
        (["arithmetic", "--url", "ftp://x"], "ftp://x"),
        (["arithmetic", "--url", "http://localhost:1", "--block-size", "16"], "block_size"),
        (["gsm8k"], "--data is needed"),
        (["gsm8k", "--data", "no/such/file", "--num-shots", "0"], "no/such/file"),
    ],
)
def test_a_user_s_fault_is_one_line_and_code_2(
    arguments: list[str],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gnomon", "eval", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capfd.readouterr().err
    assert part in said
    assert "Traceback" not in said


def test_without_matplotlib_it_is_said_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(heat_map, "find_spec", lambda name: None)
    monkeypatch.setattr(
        sys, "argv", ["gnomon", "eval", *NEEDLE, "--picture", str(tmp_path / "x.png")]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capfd.readouterr().err
    assert "pip install 'gnomon[plot]'" in said
    assert "loading" not in said


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with AskingDisplay("sums") as display:
        for done in range(101):
            display.report(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        f"sums: {done} of 100 answered" for done in (25, 50, 75, 100)
    ]
