"""`gnomon bench ops|step|serve|startup`: how fast things are on this machine.

In:  what to time. Out: a table as it is measured; --json and --picture write files. Exit code 0
     whatever the figures are: it is a measurement, not a verdict.
Not here: the measurements (gnomon.bench).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gnomon.cli.bench_serving import register_serving
from gnomon.cli.flags import ModelArgument, with_flags, with_model
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError

EXAMPLES = """\b
Examples:
  gnomon bench ops
  gnomon bench ops --only sparse_mla,topk --providers triton,flashmla --json ops.json
  gnomon bench ops --provider-path .anchors --picture ops.png
"""

STEP_EXAMPLES = """\b
Examples:
  gnomon bench step                                      the built-in model, small steps
  gnomon bench step random:h128 --decode 64x8192,128x32768 --prefill 1x8192 --max-model-len 65536
  gnomon bench step random:h16tp8 --kv-layout fp8 --attention-provider triton --profile
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
    group.command("step", epilog=STEP_EXAMPLES)(with_flags(config=EngineConfig)(step))
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
            whole = report.as_json(results, ceilings, describe_run(place))
            json_file.write_text(json.dumps(whole, indent=1) + "\n")
    if picture is not None:
        report.draw(results, picture, f"gnomon bench ops, {describe_run(place)['machine']}")


def step(
    model_argument: ModelArgument = None,
    decode: Annotated[
        str, typer.Option(metavar="BxL,...", help="Decode steps: batch x tokens in the cache.")
    ] = "1x1024,8x1024",
    prefill: Annotated[
        str, typer.Option(metavar="BxL,...", help="Prefill: prompts x tokens; empty for none.")
    ] = "1x1024",
    profile: Annotated[bool, typer.Option(help="List the kernels of each step (CUDA).")] = False,
    peer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Another engine's times of these steps.")
    ] = None,
    json_file: JsonFile = None,
    *,
    config: EngineConfig,
) -> None:
    """Decode and prefill steps of a whole model, as its engine runs them, without a server."""
    from gnomon.bench import step_report
    from gnomon.bench.ceilings import measure_ceilings
    from gnomon.bench.machine import describe_run
    from gnomon.bench.report import ceiling_line
    from gnomon.bench.step import bench_steps
    from gnomon.bench.step_inputs import fill_cache
    from gnomon.cli.progress import LoadingDisplay
    from gnomon.engine.assembly import assemble

    cells = [*_cells("decode", decode), *_cells("prefill", prefill)]
    compared = step_report.Peer(peer)
    config = with_model(config, model_argument)
    with LoadingDisplay(config.model or "the built-in model") as display:
        parts = assemble(config, display.report)
    fill_cache(parts.cache, config.seed)
    ceilings = measure_ceilings(parts.cache.device)
    typer.echo(ceiling_line(ceilings) + "\n" + step_report.HEADING)
    results = []
    max_tokens = int(parts.info.resolved["max_num_batched_tokens"][0])
    for result in bench_steps(parts, cells, max_tokens, profile):
        results.append(result)
        typer.echo(step_report.result_line(result, compared, ceilings))
        layer = step_report.layer_lines(result, compared, ceilings)
        for line in (*layer, *step_report.kernel_lines(result)):
            typer.echo(line)
        if json_file is not None:
            run = describe_run(parts.cache.device)
            whole = step_report.as_json(results, compared, ceilings, run)
            json_file.write_text(json.dumps(whole, indent=1) + "\n")


def _cells(kind: str, text: str) -> list[Any]:
    from gnomon.bench.step import StepCell

    cells = []
    for word in (part.strip() for part in text.split(",")):
        batch, times, length = word.partition("x")
        if word and not (times and batch.isdecimal() and length.isdecimal()):
            raise ConfigError(
                f"--{kind} {text!r}: give batch x length by commas, as 1x8192,64x512."
            )
        if word:
            cells.append(StepCell(kind, int(batch), int(length)))
    return cells


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
