"""Cases R of reference/bugs.md that need no stopwatch: work left out, defaults, errors."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

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
    """The gnomon commands of a shell block; where it shows prompts, of the prompt lines alone.

    A command goes on in the next line after a backslash, or until its quotes are closed. It ends at
    two spaces, behind which are words about it, and at what is the shell's.
    """
    has_prompts = any(line.startswith("$ ") for line in block.splitlines())
    found, pending = [], ""
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        start = line.removeprefix("$ ").strip()
        is_new = start.startswith("gnomon ") and line.startswith("$ ") == has_prompts
        if not (pending or is_new):
            continue
        if not pending:
            start = re.split(r"  +(?=[^'\"]*$)| [>&]", start)[0]
        pending = f"{pending}\n{line}" if pending else start
        try:
            found.append(shlex.split(pending, comments=True)[1:])
            pending = ""
        except ValueError:  # a quote is open
            continue
    assert not pending, pending
    return found


def documented_commands() -> list[list[str]]:
    """Every gnomon command of the README's and docs' blocks, fenced or indented."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        fenced = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.S)
        rest = re.sub(r"```.*?```", "", text, flags=re.S)
        indented = re.findall(r"(?:^    .*\n)+", rest, re.M)
        for block in (*fenced, *(re.sub(r"^    ", "", one, flags=re.M) for one in indented)):
            found += commands_of(block)
    return found


def parse(command: Any, words: list[str]) -> None:
    """Parse a command line down to the last subcommand; a usage error raises."""
    for name in words:
        group = getattr(command, "commands", None)
        if group is None:
            break
        assert name in group, words
        command, words = group[name], words[1:]
    command.make_context("gnomon", list(words))


def help_examples(command: Any) -> list[list[str]]:
    """The commands that help texts show, of this command and those below it."""
    found = commands_of(re.sub(r"^  ", "", command.epilog or "", flags=re.M))
    for one in getattr(command, "commands", {}).values():
        found += help_examples(one)
    return found


def test_r5_documented_commands_parse() -> None:
    """Each names a command that exists, with options that it takes."""
    app = typer.main.get_command(build_app())
    documented, shown = documented_commands(), help_examples(app)
    assert len(documented) > 30
    assert len(shown) > 20
    for words in (*documented, *shown):
        parse(app, words)
    with pytest.raises(Exception, match="No such option"):
        parse(app, ["bench", "step", "--no-such-flag"])
