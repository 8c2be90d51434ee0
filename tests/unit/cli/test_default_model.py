"""Commands that are told no model take the trained one that ships, and answer as its files say.

Oracle: sums, a planted number, the label that the commands report.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from gnomon.cli.main import build_app
from gnomon.cli.sampling_flags import SamplingFlags
from gnomon.errors import ConfigError
from gnomon.models.built_in import built_in_folder

SMALL = ["--num-kv-pages", "40", "--max-model-len", "1024"]
PROMPT = "<｜User｜>{said}<｜Assistant｜></think>"


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(build_app(), list(arguments))
    assert result.exit_code == 0, result.output
    return result


def test_generate_answers_and_is_greedy_as_the_model_says() -> None:
    prompts = [
        PROMPT.format(said="What is 378 + 256?"),
        PROMPT.format(
            said="The code for the red lamp is 48213.\nWhat is the code for the red lamp?"
        ),
    ]
    result = run("generate", *prompts, *SMALL, "-n", "2", "--json")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    texts = [[choice["text"] for choice in one["outputs"]] for one in found]
    assert texts == [["634"] * 2, ["48213"] * 2]
    assert "loaded the built-in model" in result.stderr


def test_chat_answers() -> None:
    assert run("chat", "--quick", "What is 378 + 256?", *SMALL).stdout.strip() == "634"


def test_explain_and_eval_name_it() -> None:
    facts = json.loads(run("explain", "--json").output)
    assert facts["model"]["type"] == "deepseek_v32"
    assert facts["model"]["name"] == "tiny"
    assert f"tokenizer of {built_in_folder()}" in facts["language"]
    shown = run("eval", "arithmetic", "--num-sums", "6", *SMALL).output
    assert "tiny, in process" in shown


def test_a_flag_wins_over_the_model_and_the_model_over_ours() -> None:
    defaults = {"temperature": 0.0, "top_k": 7, "max_tokens": 3, "repetition_penalty": 1.5}
    params = SamplingFlags().params(defaults=defaults)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.0, 7, 1.5)
    assert params.max_tokens == 256
    params = SamplingFlags(temperature=1.0, top_k=0).params(defaults=defaults)
    assert (params.temperature, params.top_k) == (1.0, 0)
    plain = SamplingFlags().params()
    assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, 0)
    with pytest.raises(ConfigError, match="temperature"):
        SamplingFlags(temperature=9.0).params()
