"""`gnomon verify --against` and a real server: equal with the same weights, not with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gnomon.cli.main import build_app
from gnomon.errors import ConfigError
from gnomon.verify import against_server
from gnomon.verify.against_server import CompletionServer, Dialect, Question
from tests.server.conftest import MODEL, RunningServer

SMALL = ("--prompts", "3", "--max-tokens", "6", "--max-length", "40")


def against(server: RunningServer, model: str, *more: str) -> Result:
    arguments = ["verify", model, "--against", server.url, *SMALL, *more]
    return CliRunner().invoke(build_app(), arguments)


def test_the_same_weights_are_equal(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = against(server, MODEL, "--tolerance", "1e-4", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "the server was asked with token ids, prompt_logprobs" in result.output
    values = json.loads(file.read_text())
    assert values["verdict"] == "pass"
    assert values["sides"][1].startswith("sundial at http://")
    for prompt in values["prompts"]:
        assert prompt["outcome"] == "equal"
        assert prompt["num_compared"] == prompt["num_prompt"] - 1 + 6
        assert prompt["worst"] < 1e-4


def test_other_weights_differ(server: RunningServer) -> None:
    result = against(server, f"{MODEL},seed=1")
    assert result.exit_code == 1
    assert "FAILED: prompt 0: log-probabilities off by" in result.output


def test_an_arm_configures_the_engine_here(server: RunningServer) -> None:
    result = against(server, MODEL, "--arm", "kv_layout=fp8,max_prefill_chunk=7")
    assert "fp8_ds_mla_100_c64_r16" in result.output
    fine = against(server, MODEL, "--arm", "kv_layout=fp8", "--tolerance", "1e-4")
    assert fine.exit_code == 1


def test_another_vocabulary(server: RunningServer) -> None:
    result = against(server, f"{MODEL},vocab=512")
    assert isinstance(result.exception, ConfigError)
    assert "of the 512 here. The server has another tokenizer" in str(result.exception)


@pytest.mark.parametrize("scoring", ["echo", ""])
def test_a_server_that_takes_and_tells_text_only(
    server: RunningServer, scoring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are found by their texts, as far as these say which token it is."""
    monkeypatch.setattr(against_server, "DIALECTS", (Dialect(False, scoring, False),))
    result = against(server, MODEL, "--tolerance", "1e-4")
    assert result.exit_code == 0, result.output
    assert f"the server was asked with text, {scoring or 'no scored prompt'}" in result.output
    assert against(server, f"{MODEL},seed=1").exit_code == 1


def test_shifted_scores_are_seen(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose log-probabilities are of the token before: a seeded fault."""
    score = CompletionServer.score

    def broken(self: CompletionServer, question: Question) -> Any:
        scored = score(self, question)
        moved = (None, *scored.prompt[:1], *scored.prompt[1:-1])
        return type(scored)(scored.text, scored.output, moved, scored.num_prompt_tokens)

    monkeypatch.setattr(CompletionServer, "score", broken)
    assert against(server, MODEL).exit_code == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--minutes", "1"), "--minutes is for laws"),
        (("--laws", "chunks"), "--laws is for laws"),
        (("--arm", "cp=2", "--arm", "cp=1"), "one --arm at most"),
        (("--tolerance", "0"), "tolerance is 0"),
        (("--against-model", "x"), "serves no 'x'. It lists sundial"),
    ],
)
def test_what_makes_no_sense_is_refused(
    server: RunningServer, more: tuple[str, ...], message: str
) -> None:
    result = against(server, MODEL, *more)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
