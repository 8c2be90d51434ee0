"""The command: table, JSON file, exit codes, the list of laws, wrong flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gnomon.cli.law_display import LawDisplay
from gnomon.cli.main import build_app
from gnomon.errors import ConfigError
from gnomon.verify import laws as laws_module
from gnomon.verify import run as run_module
from gnomon.verify.context import Context
from gnomon.verify.law import Law
from gnomon.verify.result import NotApplicableError, Tally

MODEL = "random:deepseek_v32,layers=2"


def sun(context: Context) -> Tally:
    tally = Tally()
    tally.add(2.5e-6)
    tally.add_choices(50_000, 2)
    tally.note("at noon")
    return tally


def cloud(context: Context) -> Tally:
    tally = Tally(unit="")
    for number in range(7):
        tally.add(failure=f"no shadow at {number}")
    return tally


def invoke(monkeypatch: pytest.MonkeyPatch, laws: tuple[Law, ...], *arguments: str) -> object:
    monkeypatch.setattr(run_module, "choose_laws", lambda names: laws)
    monkeypatch.setattr(laws_module, "LAWS", laws)
    monkeypatch.setenv("COLUMNS", "120")
    return CliRunner().invoke(build_app(), ["verify", *arguments])


def test_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    laws = (Law("sun", "the sun = its shadow", sun),)
    result = invoke(monkeypatch, laws, MODEL, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "the sun = its shadow" in result.output
    assert "2.5e-06 logit" in result.output
    assert "0 (2 of 50000 choices)" in result.output
    assert "sun: at noon" in result.output
    values = json.loads(file.read_text())
    assert values["verdict"] == "pass"
    assert values["laws"][0]["worst"] == 2.5e-6


def test_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    laws = (Law("sun", "the sun = its shadow", sun), Law("cloud", "no cloud", cloud))
    result = invoke(monkeypatch, laws, "--model", MODEL)
    assert result.exit_code == 1
    assert "cloud FAILED: no shadow at 0" in result.output
    assert "cloud: and 2 failures more" in result.output


def test_list(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch, (Law("sun", "the sun = its shadow", sun),), "--list")
    assert result.exit_code == 0
    assert result.output == "sun  the sun = its shadow\n"


def test_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch, (), MODEL, "--model", "random:glm_moe_dsa")
    assert isinstance(result.exception, ConfigError)


def test_no_folder_for_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said at once, and not after an hour of laws."""
    result = invoke(monkeypatch, (), MODEL, "--json", str(tmp_path / "absent" / "report.json"))
    assert isinstance(result.exception, ConfigError)


def test_laws_for_so_many_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two rounds and more; only the first has a line per law. A fault of any round ends in 1."""
    calls: list[int] = []

    def dusk(context: Context) -> Tally:
        calls.append(context.settings.seed)
        tally = context.tally()
        for _ in range(12):
            tally.add(failure="dark" if len(calls) == 3 else None)
        return tally

    file = tmp_path / "report.json"
    laws = (Law("dusk", "no shadow at dusk", dusk),)
    result = invoke(monkeypatch, laws, MODEL, "--minutes", "1", "--json", str(file))
    assert result.exit_code == 1
    assert calls == [0, 1, 2]
    assert "dusk: 3 rounds" in result.output
    assert "dusk FAILED: with --seed 2: dark" in result.output
    assert result.stderr.splitlines()[0] == "testing dusk (at 0 s)"
    assert result.stderr.splitlines()[1].startswith("round 2, ")
    assert json.loads(file.read_text())["laws"][0]["rounds"] == 3


def test_absent_laws_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def moon(context: Context) -> Tally:
        raise NotApplicableError("the moon has no dial")

    laws = (Law("moon", "the moon = its shadow", moon), Law("sun", "the sun = its shadow", sun))
    result = invoke(monkeypatch, laws, MODEL)
    assert result.exit_code == 0
    assert "moon: not applicable: the moon has no dial" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tolerance", "0.1"), "--tolerance is for --arm and --against"),
        (("--against-model", "sun"), "--against-model is for --against"),
        (("--arm", "cp=2", "--arm", "", "--minutes", "1"), "--minutes is for laws"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = invoke(monkeypatch, (), MODEL, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_without_a_terminal_each_law_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with LawDisplay() as display:
        for law, done in (("sun", 0), ("sun", 1), ("moon", 0), ("moon", 3)):
            display.report(law, done, 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "testing sun (at 0 s)\ntesting moon (at 0 s)\n"
