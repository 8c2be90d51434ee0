"""`gnomon generate`: complete prompts, no server.

In:  prompts as arguments, as lines of a file, or as lines of standard input.
Out: the texts on standard output, or with --json one JSON object per prompt and line: prompt,
     prompt_token_ids, num_cached_tokens, outputs (text, token_ids, finish_reason, stop_reason).
Not here: conversations (chat.py), the engine (frontend/llm.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnomon.cli.flags import with_flags
from gnomon.cli.sampling_flags import SamplingFlags
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError

if TYPE_CHECKING:
    from gnomon.frontend.outputs import RequestOutput

EXAMPLES = """\b
Examples:
  gnomon generate "The shadow of" --max-tokens 16 --temperature 0
  gnomon generate --model /models/GLM-5 --file prompts.txt --json > answers.jsonl
  cat prompts.txt | gnomon generate --choices 2
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate", epilog=EXAMPLES)(
        with_flags(sampling=SamplingFlags, config=EngineConfig)(generate)
    )


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="Prompts to complete.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read prompts from here, one a line.")] = None,
    choices: Annotated[int, typer.Option("--choices", "-n", help="Texts per prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    *,
    sampling: SamplingFlags,
    config: EngineConfig,
) -> None:
    """Complete prompts without a server."""
    texts = _prompts(prompts or [], file)
    sampling.params(n=choices)  # refuses what is wrong before anything is loaded
    from gnomon.cli.progress import LoadingDisplay
    from gnomon.frontend.llm import LLM

    with LoadingDisplay(config.model or "the built-in model") as display:
        flags: dict[str, Any] = dict(config.given())
        llm = LLM(progress=display.report, **flags)
    params = sampling.params(n=choices, defaults=llm.core.info.generation_defaults)
    for output in llm.generate(texts, params):
        if as_json:
            print(json.dumps(_fields(output), ensure_ascii=False))
        else:
            _print_text(output)


def _prompts(arguments: list[str], file: Path | None) -> list[str]:
    """The prompts from the one place that has them."""
    if arguments and file is not None:
        raise ConfigError("prompts are given as arguments and in --file: give one of them.")
    if arguments:
        return arguments
    if file is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give one as an argument, in --file, or on standard input.")
    try:
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {file or 'standard input'}: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{file or 'standard input'} holds no prompt: write one a line.")
    return lines


def _fields(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ],
    }


def _print_text(output: RequestOutput) -> None:
    for choice in output.outputs:
        number = f" #{choice.index}" if len(output.outputs) > 1 else ""
        print(
            f"── {output.prompt}{number}  ({len(choice.token_ids)} tokens, {choice.finish_reason})"
        )
        print(choice.text)
