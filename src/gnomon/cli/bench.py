"""`gnomon bench ops|step|serve|startup`: how fast things are on this machine.

In:  what to time. Out: a table as it is measured; --json and --picture write files. Exit code 0
     whatever the figures are: it is a measurement, not a verdict.
Not here: the measurements (gnomon.bench), the commands step (bench_step.py), serve and startup
(bench_serving.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gnomon.cli.bench_serving import register_serving
from gnomon.cli.bench_step import register_step
from gnomon.errors import ConfigError

EXAMPLES = """\b
Examples:
  gnomon bench ops
  gnomon bench ops --only sparse_mla,topk --providers triton,flashmla --json ops.json
  gnomon bench ops --provider-path .anchors --picture ops.png
"""

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything measured here.")
]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Time operators, steps, a running server, a start-up.",
    )
    group.command("ops", epilog=EXAMPLES)(ops)
    register_step(group)
    register_serving(group)
    app.add_typer(group, name="bench")


def ops(
    only: Annotated[
        str, typer.Option(help="Operators, or words of a cell's name, by commas; all if empty.")
    ] = "",
    providers: Annotated[str, typer.Option(help="Providers by commas; all if empty.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; auto: a GPU if there is one.")] = "auto",
    provider_path: Annotated[
        str | None, typer.Option(help="Folder with libraries of other projects.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each call.")] = 20,
    json_file: JsonFile = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the times (needs matplotlib).")
    ] = None,
) -> None:
    """Every operator at real sizes through every provider, taking turns in one process."""
    import torch

    from gnomon.attention.providers import builtin_providers
    from gnomon.attention.providers.external import external_providers
    from gnomon.bench import report
    from gnomon.bench.ceilings import measure_ceilings
    from gnomon.bench.machine import describe_run
    from gnomon.bench.op_cells import op_cells
    from gnomon.bench.ops import bench_ops
    from gnomon.bench.result_files import require_result_files, write_json

    require_result_files(json_file, picture)
    place = torch.device(_device(device))
    cells = _chosen(op_cells(place.type), only, "only", lambda cell: cell.name)
    able = (*builtin_providers(), *external_providers(provider_path))
    able = _chosen(able, providers, "providers", lambda provider: provider.name)
    ceilings = measure_ceilings(place)
    typer.echo(report.ceiling_line(ceilings) + "\n" + report.HEADING)
    results = []
    for result in bench_ops(cells, able, ceilings, runs):
        results.append(result)
        typer.echo("\n".join(report.cell_lines(result)))
        if json_file is not None:
            write_json(json_file, report.as_json(results, ceilings, describe_run(place)))
    if picture is not None:
        report.draw(results, picture, f"gnomon bench ops, {describe_run(place)['machine']}")


def _device(name: str) -> str:
    import torch

    has_cuda = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda") or (name == "cuda" and not has_cuda):
        raise ConfigError(
            f"device is {name!r}: allowed here are auto, cpu{', cuda' if has_cuda else ''}."
        )
    return name if name != "auto" else "cuda" if has_cuda else "cpu"


def _chosen(items: Any, words: str, flag: str, name_of: Any) -> tuple[Any, ...]:
    """The items that a word, by commas, is part of; all for no words. ConfigError for none."""
    wished = [word.strip() for word in words.split(",") if word.strip()]
    names = [name_of(item) for item in items]
    for word in wished:
        if not any(word in name for name in names):
            raise ConfigError(f"--{flag}: nothing is called {word!r}; there are: {names}.")
    return tuple(
        item for item in items if not wished or any(word in name_of(item) for word in wished)
    )
