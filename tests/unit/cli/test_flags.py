"""The command line without a model: help, flags, errors and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gnomon.cli.flags import FOREIGN_FLAGS, refuse_foreign_flags, with_flags, with_model
from gnomon.cli.main import build_app, main
from gnomon.cli.progress import LoadingDisplay
from gnomon.engine.config import EngineConfig, flag_specs
from gnomon.errors import ConfigError
from gnomon.server.address import bind, url_of
from gnomon.server.settings import ServerSettings

COMMANDS = ("serve", "chat", "generate", "explain", "env")


def parse(*arguments: str) -> tuple[EngineConfig, ServerSettings]:
    """What a command with all flags gets for a command line."""
    got: list[Any] = []

    def command(config: EngineConfig, settings: ServerSettings) -> None:
        got.extend((config, settings))

    app = typer.Typer()
    app.command()(with_flags(config=EngineConfig, settings=ServerSettings)(command))
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return got[0], got[1]


def test_nothing_given_is_every_default() -> None:
    assert parse() == (EngineConfig(), ServerSettings())


def test_flags_in_the_spelling_of_vllm() -> None:
    config, settings = parse(
        *("-tp", "1"),
        *("--max-model-len", "2048"),
        *("--kv-cache-dtype", "fp8"),
        *("--served-model-name", "sundial"),
        *("--max-num-batched-tokens", "256"),
        *("--max-num-seqs", "4"),
        "--enforce-eager",
        *("--seed", "3"),
        *("--block-size", "16"),
        *("--dtype", "bfloat16"),
        "--no-enable-prefix-caching",
        *("--hf-overrides", '{"index_topk": 8}'),
        *("--host", "0.0.0.0"),
        *("--port", "9000"),
        *("--api-key", "secret"),
        "--log-requests",
    )
    assert config == EngineConfig(
        max_model_len=2048,
        kv_layout="fp8",
        served_model_name="sundial",
        max_num_batched_tokens=256,
        max_num_seqs=4,
        enforce_eager=True,
        seed=3,
        block_size=16,
        dtype="bfloat16",
        enable_prefix_caching=False,
        hf_overrides={"index_topk": 8},
    )
    assert settings == ServerSettings(
        host="0.0.0.0", port=9000, api_key="secret", log_requests=True
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dtype", "float3"], "float3"),
        (["--max-model-len", "0"], "max_model_len is 0"),
        (["--hf-overrides", "{"], "valid JSON"),
        (["--hf-overrides", "[]"], "object"),
        (["-tp", "2"], "tensor_parallel_size is 2"),
    ],
)
def test_a_wrong_value_is_a_config_error(arguments: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse(*arguments)


def test_the_model_is_an_argument_or_a_flag() -> None:
    assert with_model(EngineConfig(seed=3), "a") == EngineConfig(seed=3, model="a")
    assert with_model(EngineConfig(model="a"), "a").model == "a"
    assert with_model(EngineConfig(model="a"), None).model == "a"
    with pytest.raises(ConfigError, match="give one of them"):
        with_model(EngineConfig(model="a"), "b")


def test_flags_of_other_engines_are_answered() -> None:
    own = {spelling for cls in (EngineConfig, ServerSettings) for spec in flag_specs(cls)
           for spelling in spec.spellings}  # fmt: skip
    assert not own & set(FOREIGN_FLAGS)
    for hint in FOREIGN_FLAGS.values():
        for word in hint.replace(";", " ").split():
            assert not word.startswith("-") or word in own or word.startswith("--no-")
    with pytest.raises(ConfigError, match=r"--context-length.*--max-model-len"):
        refuse_foreign_flags(["serve", "--context-length=3"])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    result = CliRunner().invoke(build_app(), [command, "--help"])
    assert result.exit_code == 0
    assert f"  gnomon {command}" in result.output.split("Examples:")[1]


def test_help_names_every_flag() -> None:
    text = CliRunner().invoke(build_app(), ["serve", "--help"]).output
    for cls in (EngineConfig, ServerSettings):
        for spec in flag_specs(cls):
            for spelling in spec.spellings:
                assert spelling in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--max-model-len", "many"], "--max-model-len"),
        (["serve", "--trust-remote-code"], "ever run"),
        (["serve", "no/such/model"], "no/such/model"),
        (["explain", "random:deepseek_v99"], "deepseek_v99"),
        (["explain", "--dtype", "int4"], "int4"),
        (["nonsense"], "nonsense"),
        (["chat", "--url", "ftp://x"], "ftp://x"),
        (["generate", "a", "--file", "b"], "one of them"),
        (["generate", "a", "--temperature", "9"], "temperature"),
    ],
)
def test_a_user_s_fault_is_one_line_and_code_2(
    arguments: list[str],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gnomon", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capfd.readouterr().err
    assert part in said
    assert "Traceback" not in said


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys; from gnomon.cli.main import build_app; build_app();"
        "print([name for name in ('torch', 'fastapi', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_server_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with bind(ServerSettings(port=0)) as closed:  # bound, but nobody listens
        arguments = ["gnomon", "chat", "--url", url_of(closed), "--quick", "hi"]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code == 1
    assert "no answer from" in capfd.readouterr().err


def test_generate_prints_one_object_per_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("At noon\n\nthe shadow\n", encoding="utf-8")
    arguments = ["generate", "--model", "random:deepseek_v32,layers=1", "--file", str(file)]
    limits = ["--num-kv-pages", "40", "--max-tokens", "3", "--temperature", "0", "-n", "2"]
    result = CliRunner().invoke(build_app(), [*arguments, *limits, "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["At noon", "the shadow"]
    for row in rows:
        assert [len(output["token_ids"]) for output in row["outputs"]] == [3, 3]
        assert row["outputs"][0]["text"] == row["outputs"][1]["text"]  # greedy
    assert "loaded random:deepseek_v32,layers=1" in result.stderr


def test_loading_is_told_in_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LoadingDisplay("a model") as display:
        for done in range(0, 101):
            display.report("weights", done * 2**20, 100 * 2**20)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading a model"
    assert [line.rpartition(" at ")[0] for line in lines[1:-1]] == [
        f"  weights {share}% {share} of 100 MiB" for share in (0, 25, 50, 75, 100)
    ]
    assert lines[-1].startswith("loaded a model in ")


def test_env_tells_versions_and_hardware() -> None:
    result = CliRunner().invoke(build_app(), ["env", "--json"])
    facts = json.loads(result.output)
    assert {"gnomon", "python", "torch", "cpu", "cpu cores", "gpus"} <= set(facts)


def test_explain_needs_no_weights() -> None:
    arguments = ["explain", "random:glm_moe_dsa", "--num-kv-pages", "64", "--json"]
    result = CliRunner().invoke(build_app(), arguments)
    facts = json.loads(result.output)
    assert facts["model"]["type"] == "glm_moe_dsa"
    assert facts["cache"]["smallest reusable prefix step in tokens"] == 64
    rows = {row["name"]: row for row in facts["configuration"]}
    assert rows["num_kv_pages"]["value"] == 64
    assert rows["num_kv_pages"]["source"] == "flag"
    assert {"sparse_mla", "topk"} <= {row["operator"] for row in facts["operators"]}
    shown = CliRunner().invoke(build_app(), arguments[:-1]).output
    assert "sparse_mla" in shown
    assert "smallest reusable prefix step: 64 tokens" in shown
