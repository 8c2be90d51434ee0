"""`gnomon bench serve` and `gnomon bench startup`: a running server, and one that comes up.

In:  a URL, or the arguments of `gnomon serve`. Out: a table; --json and --picture write files.
Not here: the measurements (gnomon.bench).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnomon.bench.serve import ServeSettings
from gnomon.cli.flags import with_flags

if TYPE_CHECKING:
    from gnomon.bench.serve import ServeResult

SERVE_EXAMPLES = """\b
Examples:
  gnomon bench serve --url http://localhost:8000
  gnomon bench serve --concurrency 64 --num-requests 512 --input-len 2048
  gnomon bench serve --request-rate 4 --json serve.json --picture serve.png
"""
STARTUP_EXAMPLES = """\b
Examples:
  gnomon bench startup
  gnomon bench startup --json startup.json --picture startup.png -- random:h128 --kv-layout fp8
"""

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything measured here.")
]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Draw the times (needs matplotlib).")
]


def register_serving(group: typer.Typer) -> None:
    """Add both commands to the group."""
    group.command("serve", epilog=SERVE_EXAMPLES)(with_flags(settings=ServeSettings)(serve))
    group.command("startup", epilog=STARTUP_EXAMPLES)(startup)


def serve(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://localhost:8000",
    served_model: Annotated[
        str, typer.Option(help="The model's name there; empty: the first that it names.")
    ] = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="GNOMON_API_KEY", help="The server's key.")
    ] = None,
    json_file: JsonFile = None,
    picture: Picture = None,
    *,
    settings: ServeSettings,
) -> None:
    """Time to first token, time per token, throughput and goodput of a running server."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from gnomon.bench.machine import describe_run
    from gnomon.bench.result_files import require_result_files, write_json
    from gnomon.bench.serve import bench_serve
    from gnomon.bench.serving_pictures import draw_serve

    require_result_files(json_file, picture)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=settings.num_requests)
        result = bench_serve(
            url, served_model, settings, api_key, lambda done: bar.update(task, completed=done)
        )
    for line in _lines(result):
        typer.echo(line)
    if json_file is not None:
        whole = {
            "run": describe_run(torch.device("cpu")) | {"url": url},
            "settings": asdict(settings),
            "seconds": result.seconds,
            "percentiles": result.percentiles(),
            "rates": result.rates(),
            "client": asdict(result.client),
            "answers": [asdict(answer) for answer in result.answers],
        }
        write_json(json_file, whole)
    if picture is not None:
        draw_serve(result, picture)
    if not result.good:
        raise typer.Exit(1)


def startup(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of gnomon serve, behind --.")
    ] = None,
    json_file: JsonFile = None,
    picture: Picture = None,
) -> None:
    """Seconds until a server is healthy and has answered, with cold and with warm kernel caches."""
    import torch

    from gnomon.bench.machine import describe_run
    from gnomon.bench.result_files import require_result_files, write_json
    from gnomon.bench.serving_pictures import draw_startup
    from gnomon.bench.startup import bench_startup

    require_result_files(json_file, picture)
    run = describe_run(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    typer.echo(f"{'caches':<8} {'healthy s':>10} {'first answer s':>15}")
    times = []
    for taken in bench_startup(arguments or []):
        times.append(taken)
        typer.echo(f"{taken.kind:<8} {taken.healthy_s:>10.1f} {taken.first_answer_s:>15.1f}")
        if taken.stages:
            done = ", ".join(f"{name} at {seconds:.1f} s" for name, seconds in taken.stages)
            typer.echo(f"         of the loading: {done}")
        if json_file is not None:
            write_json(json_file, {"run": run, "startup": [asdict(one) for one in times]})
    if picture is not None:
        words = " ".join(["gnomon serve", *(arguments or [])])
        draw_startup(times, picture, f"{words}, {run['machine']}")


def _lines(result: ServeResult) -> list[str]:
    failed = [answer for answer in result.answers if answer.error]
    lines = [f"{'':<10} {'p50':>10} {'p90':>10} {'p99':>10}"]
    for name, values in result.percentiles().items():
        numbers = " ".join(f"{value:>10.2f}" for value in values.values())
        lines.append(f"{name:<10} {numbers}")
    lines += [f"{name:<20} {value:>10.2f}" for name, value in result.rates().items()]
    lines.append(f"{len(result.good)} of {len(result.answers)} answered in {result.seconds:.1f} s")
    load = result.client
    lines.append(
        f"client: busy {load.cpu_share:.0%} of the time, {load.busiest_share:.0%} in its busiest "
        f"quarter second; looked {load.late_ms:.1f} ms late (p99)"
    )
    if load.is_bottleneck and result.good:
        lines.append("the client itself was the bottleneck: times and rates are partly its own")
    lines += [f"failed: {answer.error}" for answer in failed[:3]]
    return lines
