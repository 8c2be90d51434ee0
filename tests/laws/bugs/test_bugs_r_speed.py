"""Cases R of reference/bugs.md that need no stopwatch: work left out, defaults, errors."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from gnomon.cli.main import build_app
from gnomon.engine import assembly
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError
from tests.laws.bugs.engines import bug_core, outputs, prompt, request
from tests.laws.bugs.op_cases import watched
from tests.laws.bugs.tiny import Bench, t0_spec, token_list

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_r1_prompts_up_to_topk_are_not_scored(kind: str) -> None:
    """No score, no top-k up to K keys; past K there are. Index keys are always written."""
    bench, calls = Bench(kind), []
    bench.ops = watched(bench.ops, lambda name, _: calls.append(name))
    one = bench.request("r", token_list(10))
    for n, is_scored in ((7, False), (1, False), (1, True)):
        calls.clear()
        bench.step([(one, n)])
        scored = {"index_scores", "index_scores_paged", "topk"} & set(calls)
        assert bool(scored) == is_scored
        full = sum(bench.config.has_indexer(i) for i in range(bench.config.num_hidden_layers))
        assert calls.count("index_prepare") == full


@pytest.mark.parametrize("layout", ["auto", "bfloat16", "fp8"])
def test_r4_the_defaults_start(layout: str) -> None:
    """No flag but the model and the format: page size, pages and lengths fit each other."""
    core = bug_core(
        kv_layout=layout, block_size=EngineConfig.of().block_size, num_kv_pages=None,
        kv_cache_memory="4MiB", dtype="auto",
    )  # fmt: skip
    assert len(outputs(core, [request("r", prompt(70), 3)])["r"]) == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"num_kv_pages": 3, "max_model_len": 512},
            r"max_model_len = 512 .* raise kv_cache_memory",
        ),
        ({"block_size": 0}, "block_size"),
        ({"kv_cache_memory": "1KiB"}, "Raise --kv-cache-memory"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 4}, "max_num_batched_tokens is 4"),
    ],
    ids=["pages", "page size", "memory", "rows"],
)
def test_r4_errors_name_the_flag_and_the_value(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assembly.survey(EngineConfig.of(model=t0_spec(), dtype="float32", **flags))


def commands_of(block: str) -> list[list[str]]:
    """Words of the `gnomon ...` commands of a shell block; where it has prompts, of these lines.

    A command goes on in the next line after a backslash, or until its quotes are closed.
    """
    has_prompts = any(line.startswith("$ ") for line in block.splitlines())
    found, pending = [], ""
    for line in block.replace("\\\n", " ").splitlines():
        start = line.removeprefix("$ ").strip()
        is_new = start.startswith("gnomon ") and line.startswith("$ ") == has_prompts
        if not (pending or is_new):
            continue
        pending = f"{pending}\n{line}" if pending else start
        try:
            found.append(shlex.split(pending, comments=True)[1:])
            pending = ""
        except ValueError:  # a quote is open
            continue
    assert not pending, pending
    return found


def documented_commands() -> list[list[str]]:
    """Every gnomon command of the README's and docs' shell blocks."""
    return [
        words
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", path.read_text(), re.S)
        for words in commands_of(block)
    ]


def test_r5_documented_commands_parse() -> None:
    """Each names a command that exists, with options that it takes."""
    app = typer.main.get_command(build_app())
    known = getattr(app, "commands")  # noqa: B009  (typer brings its own click)
    commands = documented_commands()
    assert commands
    for name, *arguments in commands:
        assert name in known, name
        known[name].make_context(name, list(arguments))  # a usage error raises
    with pytest.raises(Exception, match="No such option"):
        known["serve"].make_context("serve", ["--no-such-flag"])
