"""`gnomon verify`: put the laws to the test, here, with this model.

In:  a model and flags (VerifySettings).
Out: a table: law, cases, worst difference, ties, verdict; with --json a file that says more. Exit
     code 0 if every law passed, 1 if one failed, 3 if none failed but some could not be run.
Not here: the laws (gnomon.verify).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnomon.cli.flags import with_flags
from gnomon.errors import ConfigError
from gnomon.verify.settings import VerifySettings

if TYPE_CHECKING:
    from rich.console import Console

    from gnomon.verify.result import LawResult
    from gnomon.verify.run import Report

EXAMPLES = """\b
Examples:
  gnomon verify                                    the small built-in model, all laws
  gnomon verify random:glm_moe_dsa --prompts 300 --json glm.json
  gnomon verify --minutes 5                        ever other prompts for five minutes
  gnomon verify /models/GLM-5 --laws routes,chunks,prefixes
  gnomon verify --list                             the laws, in one sentence each
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify", epilog=EXAMPLES)(with_flags(settings=VerifySettings)(verify))


def verify(
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder, random:NAME,key=value, or nothing."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report here too.")
    ] = None,
    lists_laws: Annotated[bool, typer.Option("--list", help="Print the laws and end.")] = False,
    *,
    settings: VerifySettings,
) -> None:
    """Check gnomon against transformers and against itself, on this machine."""
    from gnomon.cli.law_display import LawDisplay
    from gnomon.verify.laws import LAWS
    from gnomon.verify.run import run_laws

    if lists_laws:
        width = max(len(law.name) for law in LAWS)
        for law in LAWS:
            print(f"{law.name:<{width}}  {law.sentence}")
        return
    settings = _with_model(settings, model_argument)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json is {str(json_file)!r}: there is no folder of that name.")
    with LawDisplay(settings.minutes) as display:
        report = run_laws(settings, display.report, display.begin_round)
    _print(report)
    if json_file is not None:
        text = json.dumps(report.as_json(), indent=2, ensure_ascii=False)
        json_file.write_text(text + "\n", encoding="utf-8")
    raise typer.Exit(report.exit_status)


def _with_model(settings: VerifySettings, model: str | None) -> VerifySettings:
    """The settings for a MODEL argument; --model may not name another one."""
    if model is None:
        return settings
    if settings.model not in (None, model):
        raise ConfigError(f"MODEL is {model!r} and --model is {settings.model!r}: give one.")
    return VerifySettings.of(**{**settings.given(), "model": model})


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"laws of {report.model}", title_justify="left", title_style="bold")
    table.add_column("law", overflow="fold")
    for name in ("cases", "worst difference", "ties"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for result in report.results:
        table.add_row(
            result.sentence, str(result.cases), _worst(result), _ties(result), str(result.verdict)
        )
    console.print(table, markup=False)
    for condition in report.conditions:
        console.print(condition, highlight=False, markup=False)
    for result in report.results:
        _print_remarks(console, result)
    verdict = report.as_json()["verdict"]
    console.print(f"{verdict}: {report.seconds:.0f} s", highlight=False, markup=False)


def _print_remarks(console: Console, result: LawResult) -> None:
    """What the table has no room for: rounds, conditions, failures."""
    from gnomon.verify.result import Verdict

    rounds = f"{result.rounds} rounds" if result.rounds > 1 else ""
    absent = result.verdict is Verdict.NOT_APPLICABLE
    detail = f"not applicable: {result.detail}" if absent else result.detail
    if rounds or detail:
        text = "; ".join(part for part in (rounds, detail) if part)
        console.print(f"{result.law}: {text}", highlight=False, markup=False)
    for failure in result.failures:
        console.print(f"{result.law} FAILED: {failure}", highlight=False, markup=False)
    hidden = result.num_failures - len(result.failures)
    if hidden > 0:
        console.print(f"{result.law}: and {hidden} failures more", highlight=False, markup=False)


def _worst(result: LawResult) -> str:
    return f"{result.worst:.2g} {result.unit}" if result.unit and result.cases else ""


def _ties(result: LawResult) -> str:
    """Cases whose tokens were a tie; and of the choices, if any was."""
    if not result.choice_ties:
        return str(result.ties)
    return f"{result.ties} ({result.choice_ties} of {result.choices} choices)"
