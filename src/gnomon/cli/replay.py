"""`gnomon replay`: run a recorded step through a provider and say where it differs.

In:  a file made with --record, a provider: its name, or module:attribute of one of your own.
Out: a table by operator and the first difference, or JSON. Exit code 0 if every call came out as
     recorded, within the tolerance of its operator; 1 if not; 2 for a file that is no recording.
No model is loaded: a recording holds what its operators need. A *-lost.json is another matter
(replay_lost.py).
Not here: recording (engine/record.py), the comparison (attention/recording_compare.py).
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnomon.errors import ConfigError

if TYPE_CHECKING:
    from gnomon.attention.dispatch import Provider
    from gnomon.attention.recording import Recording
    from gnomon.attention.recording_replay import ReplayReport

EXAMPLES = """\b
Examples:
  gnomon serve --record /tmp/steps
  gnomon generate "The shadow of" --record /tmp/steps --record-steps 2..3
  gnomon replay /tmp/steps/20261129-184512-step-2.safetensors --provider reference
  gnomon replay step.safetensors --provider mykernels.sparse:PROVIDER --json
  gnomon replay /tmp/steps/20261129-184512-step-7-lost.json --check full
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay", epilog=EXAMPLES)(replay)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recorded step.")],
    provider: Annotated[
        str | None,
        typer.Option(
            help="Who runs the calls: a name, or module:attribute; not given: reference, and for a "
            "lost step whoever ran it."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where they run: cpu, cuda; not given: cpu, a lost step where it ran."),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(help="Of a lost step: checked mode, off, sampled or full (the default)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a recorded step through a provider and say where it differs."""
    from gnomon.attention.recording_file import read_recording
    from gnomon.attention.recording_replay import replay as run
    from gnomon.attention.recording_report import as_json as plain
    from gnomon.cli.replay_lost import is_lost_step, replay_lost_step

    if is_lost_step(file):
        raise typer.Exit(replay_lost_step(file, provider, device, check or "full", as_json))
    if check is not None:
        raise ConfigError(f"--check is for *-lost.json, and {file} is none. Leave it out.")
    recording = read_recording(file)
    report = run(recording, _provider(provider or "reference"), _device(device or "cpu"))
    if as_json:
        print(json.dumps({"file": str(file), **plain(report, recording)}, indent=2))
    else:
        _print(report, recording)
    raise typer.Exit(0 if report.first is None else 1)


def _provider(name: str) -> Provider:
    """A built-in provider by name, or an attribute of a module."""
    from gnomon.attention.providers import builtin_providers

    known = {provider.name: provider for provider in builtin_providers()}
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"no provider is called {name!r}; there are {', '.join(sorted(known))}, and your own "
            "as module:attribute"
        )
    try:
        found: Provider = getattr(import_module(module), attribute)
        assert callable(found.supports)
        assert callable(found.kernel)
    except (ImportError, AttributeError, AssertionError) as error:
        raise ConfigError(f"provider {name!r} cannot be taken from its module: {error}") from None
    return found


def _device(name: str) -> str:
    import torch

    if name == "cpu" or (name.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        return name
    raise ConfigError(f"device is {name!r}; allowed are cpu, and cuda where torch finds a GPU")


def _print(report: ReplayReport, recording: Recording) -> None:
    from gnomon.attention.recording_report import describe

    step = recording.step
    facts = [f"{name} {value}" for name, value in recording.origin.items()]
    names = ", ".join(sorted(set(recording.providers.values())))
    print(f"recorded   step {step.step_id if step else '?'} ({recording.reason}), run by {names}")
    if step is not None:
        rows, requests = step.geometry.rows, step.geometry.requests
        print(f"           {rows.num_live} rows of {requests.num_requests} requests")
    print(f"           {', '.join(facts)}")
    if recording.error:
        print(f"failed     {recording.error}")
    if report.geometry_fault:
        print(f"geometry   {report.geometry_fault}")
    print(f"replayed   {report.num_run} of {len(report.calls)} calls by {report.provider}\n")
    _print_operators(report)
    first = report.first
    if first is None:
        print("every call came out as recorded, within the tolerance of its operator")
        return
    print(f"first difference: {describe(first, recording)}")
    if first.recorded_error:
        print(f"when it was recorded, this call raised {first.recorded_error}")


def _print_operators(report: ReplayReport) -> None:
    from gnomon.attention.recording_report import by_operator

    row = "{:<20}{:>6}{:>6}{:>7}{:>8}{:>18}{:>12}"
    print(
        row.format("operator", "calls", "run", "equal", "differ", "worst difference", "of allowed")
    )
    for one in by_operator(report):
        if not one.num_run:
            why = next(call.skipped for call in report.calls if call.op == one.op)
            print(f"{one.op:<20}{one.num_calls:>6}{0:>6}  {why}")
            continue
        counts = (one.num_calls, one.num_run, one.num_equal, one.num_differing)
        print(row.format(one.op, *counts, f"{one.worst:.3g}", f"{100 * one.share:.3g} %"))
    print()
