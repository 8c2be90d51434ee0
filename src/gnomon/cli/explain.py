"""`gnomon explain`: what would be used for a model on this machine, and why.

In:  a model and engine flags, as for serve.   Out: tables, or JSON. No weight is read.
Says: every value of the configuration and where it came from; the provider of each operator, phase
by phase where they differ, and why not the others, libraries that are not installed among them (and
what to do about it); the parts of the cache, its pages, the smallest prefix that can be reused; the
tokenizer and the chat encoding.
Not here: the choices themselves (engine/assembly.survey, text/language.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnomon.cli.flags import ModelArgument, with_flags, with_model
from gnomon.engine.config import EngineConfig

if TYPE_CHECKING:
    from gnomon.engine.assembly import Survey

EXAMPLES = """\b
Examples:
  gnomon explain
  gnomon explain /models/GLM-5 --max-model-len 8192
  gnomon explain random:deepseek_v32,layers=2 --kv-cache-dtype fp8 --json
  gnomon explain /models/GLM-5 --provider-path ./libraries --decode-backend flashmla
"""

MIB = 2**20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain", epilog=EXAMPLES)(with_flags(config=EngineConfig)(explain))


def explain(
    model_argument: ModelArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Print what would be used for a model here, and why. Loads no weights."""
    facts = survey_facts(with_model(config, model_argument))
    if as_json:
        print(json.dumps(facts, indent=2, default=str))
    else:
        _print_tables(facts)


def survey_facts(config: EngineConfig) -> dict[str, Any]:
    """Everything that the command prints, as plain values."""
    from gnomon.engine.assembly import survey
    from gnomon.frontend.language import language_of

    language = language_of(config)
    size = None if language is None else language.tokenizer.vocab_size
    found = survey(config, size)
    return {
        "model": {
            "name": found.source.label,
            "type": str(found.source.config.model_type),
            "folder": None if found.source.folder is None else str(found.source.folder),
            "layers": found.source.config.num_hidden_layers,
            "vocabulary": found.source.config.vocab_size,
        },
        "language": "token ids only" if language is None else language.reason,
        "configuration": [
            {"name": name, "value": value, "source": source, "reason": reason}
            for name, (value, source, reason) in found.resolved.table().items()
        ],
        "operators": _operators(found),
        "cache": _cache(found),
    }


def _operators(found: Survey) -> list[dict[str, str]]:
    """A row for each operator, or one for each phase where decode has another provider."""
    names = ("operator", "provider", "reason", "rejected")
    return [dict(zip(names, row, strict=True)) for row in found.operator_rows()]


def _cache(found: Survey) -> dict[str, Any]:
    schema, pages = found.resolved.schema, found.resolved.num_pages
    groups = []
    for group in schema.groups:
        layouts: dict[str, int] = {}
        for part in group.parts:
            layouts[part.layout.id] = layouts.get(part.layout.id, 0) + 1
        groups.append(
            {
                "group": group.name,
                "parts": ", ".join(f"{count} x {name}" for name, count in layouts.items()),
                "tokens per page": group.tokens_per_page,
                "bytes per page": group.bytes_per_page,
                "pages": pages[group.name],
                "MiB": round(pages[group.name] * group.bytes_per_page / MIB, 1),
                "sharing": str(group.sharing),
                "rollback": str(group.rollback),
            }
        )
    return {"groups": groups, "smallest reusable prefix step in tokens": schema.prefix_step_tokens}


def _print_tables(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=False)
    named = "  ".join(f"{name} {value}" for name, value in facts["model"].items() if value)
    console.print(f"model: {named}", highlight=False, markup=False)
    console.print(f"language: {facts['language']}", highlight=False, markup=False)
    for title in ("configuration", "operators"):
        rows = facts[title]
        table = Table(title=title, title_justify="left", title_style="bold")
        for name in rows[0]:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*("" if value is None else str(value) for value in row.values()))
        console.print(table, markup=False)
    for group in facts["cache"]["groups"]:
        for name, value in group.items():
            console.print(f"cache {name}: {value}", highlight=False, markup=False)
    step = facts["cache"]["smallest reusable prefix step in tokens"]
    console.print(f"smallest reusable prefix step: {step} tokens", highlight=False)
