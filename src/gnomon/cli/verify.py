"""`gnomon verify`: put the laws to the test, here, with this model; or compare two sides.

In:  a model and flags (VerifySettings); with --arm twice, two configurations of the engine; with
     --against, a running server.
Out: a table: law, cases, worst difference, ties, verdict; or prompt by prompt: equal, a tie, or the
     first difference with its margin. With --json a file that says more. Exit code 0 if every law
     passed and no prompt differs, 1 if not, 3 if none failed but some laws could not be run, or
     had not enough cases when the time was up.
Not here: the laws (gnomon.verify), tables (verify_tables.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gnomon.cli.flags import with_flags
from gnomon.errors import ConfigError
from gnomon.verify.settings import SideSettings, VerifySettings

EXAMPLES = """\b
Examples:
  gnomon verify                                    the small built-in model, all laws
  gnomon verify random:glm_moe_dsa --prompts 300 --json glm.json
  gnomon verify --minutes 5                        ever other prompts for five minutes
  gnomon verify random:deepseek_v32 --kv-layout fp8_ds_mla_656
  gnomon verify /models/GLM-5 --laws routes,chunks,prefixes
  gnomon verify --arm cp=4 --arm cp=1              four simulated ranks = one
  gnomon verify --against http://localhost:8000    a running server = this engine
  gnomon verify --list                             the laws, in one sentence each
"""

Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="KEY=VALUE,...",
        help="One of two engine configurations to compare, prompt by prompt; give it twice.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify", epilog=EXAMPLES)(
        with_flags(settings=VerifySettings, sides=SideSettings)(verify)
    )


def verify(
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder, random:NAME,key=value, builtin:NAME."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report here too.")
    ] = None,
    lists_laws: Annotated[bool, typer.Option("--list", help="Print the laws and end.")] = False,
    arms: Arms = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="GNOMON_API_KEY", help="The server's key.")
    ] = None,
    *,
    settings: VerifySettings,
    sides: SideSettings,
) -> None:
    """Check gnomon against transformers and against itself, on this machine."""
    if lists_laws:
        _print_list()
        return
    settings = _with_model(settings, model_argument)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json is {str(json_file)!r}: there is no folder of that name.")
    sides.check_use(len(arms or ()))
    if arms or sides.against is not None:
        status, values = _compare(settings, sides, arms or [], api_key)
    else:
        status, values = _run_laws(settings)
    if json_file is not None:
        text = json.dumps(values, indent=2, ensure_ascii=False)
        json_file.write_text(text + "\n", encoding="utf-8")
    raise typer.Exit(status)


def _print_list() -> None:
    from gnomon.verify.laws import LAWS

    width = max(len(law.name) for law in LAWS)
    for law in LAWS:
        print(f"{law.name:<{width}}  {law.sentence}")


def _run_laws(settings: VerifySettings) -> tuple[int, dict[str, object]]:
    """(exit status, the report as plain values)."""
    from gnomon.cli.law_display import LawDisplay
    from gnomon.cli.verify_tables import print_laws
    from gnomon.verify.run import run_laws

    with LawDisplay(settings.minutes) as display:
        report = run_laws(settings, display.report, display.begin_round)
    print_laws(report)
    return report.exit_status, report.as_json()


def _compare(
    settings: VerifySettings, sides: SideSettings, arms: Sequence[str], api_key: str | None
) -> tuple[int, dict[str, object]]:
    """The same for two sides."""
    from gnomon.cli.law_display import LawDisplay
    from gnomon.cli.verify_tables import print_comparison
    from gnomon.verify.against_server import CompletionServer
    from gnomon.verify.comparison import run_against, run_arms

    with LawDisplay() as display:
        if sides.against is None:
            report = run_arms(settings, arms, sides.tolerance, display.report)
        else:
            server = CompletionServer(sides.against, sides.against_model, api_key)
            report = run_against(settings, server, arms, sides.tolerance, display.report)
    print_comparison(report)
    return report.exit_status, report.as_json()


def _with_model(settings: VerifySettings, model: str | None) -> VerifySettings:
    """The settings for a MODEL argument; --model may not name another one."""
    if model is None:
        return settings
    if settings.model not in (None, model):
        raise ConfigError(f"MODEL is {model!r} and --model is {settings.model!r}: give one.")
    return VerifySettings.of(**{**settings.given(), "model": model})
