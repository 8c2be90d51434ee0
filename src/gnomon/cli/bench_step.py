"""`gnomon bench step`: how long steps of a whole model take, without scheduler and server.

In:  a model with the engine's flags, the steps to time. Out: a table as it is measured; --json and
     --picture write files. ConfigError, before anything is loaded, for what could only be ignored.
Not here: the measurements (bench/step.py), the tables (bench/step_report.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnomon.cli.flags import ModelArgument, with_flags, with_model
from gnomon.engine.config import EngineConfig
from gnomon.engine.flags import Flag, check_flags
from gnomon.errors import ConfigError

if TYPE_CHECKING:
    from gnomon.bench.step import StepCell
    from gnomon.bench.step_report import Peer
    from gnomon.engine.assembly import Parts

EXAMPLES = """\b
Examples:
  gnomon bench step                                      the built-in model, small steps
  gnomon bench step random:h128 --decode 64x8192,128x32768 --prefill 1x8192 --max-model-len 65536
  gnomon bench step random:h16tp8 --kv-layout fp8 --attention-provider triton --profile
  gnomon bench step random:glm_h8tp8 --kv-layout fp8 --picture steps.png
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAsked:
    """Which steps, and whether their kernels are listed."""

    decode: Annotated[
        str, Flag("decode steps, batch x tokens in the cache: 1x8192,64x8192; empty: none")
    ] = "1x1024,8x1024"
    prefill: Annotated[str, Flag("prefill, prompts x tokens: 1x8192,8x4096; empty: none")] = (
        "1x1024"
    )
    profile: Annotated[
        bool, Flag("list the kernels of each step, and one layer by class (GPU)")
    ] = False

    def __post_init__(self) -> None:
        check_flags(self)

    def cells(self) -> list[StepCell]:
        """All steps, decode first. ConfigError if there are none."""
        cells = [*step_cells("decode", self.decode), *step_cells("prefill", self.prefill)]
        if not cells:
            raise ConfigError("nothing to measure: give --decode or --prefill, as 1x8192,64x512.")
        return cells


def register_step(group: typer.Typer) -> None:
    """Add the command to the group."""
    decorate = with_flags(asked=StepsAsked, config=EngineConfig)
    group.command("step", epilog=EXAMPLES)(decorate(step))


def step(
    model_argument: ModelArgument = None,
    peer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Another engine's times of these steps.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything measured here.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the times (needs matplotlib).")
    ] = None,
    *,
    asked: StepsAsked,
    config: EngineConfig,
) -> None:
    """Decode and prefill steps of a whole model, as its engine runs them, without a server."""
    from gnomon.bench.result_files import require_result_files
    from gnomon.bench.step_report import Peer
    from gnomon.cli.progress import LoadingDisplay
    from gnomon.engine.assembly import assemble

    require_result_files(json_file, picture)
    cells = asked.cells()
    _require_sense(config, asked)
    compared = Peer(peer)
    config = with_model(config, model_argument)
    with LoadingDisplay(config.model or "the built-in model") as display:
        parts = assemble(config, display.report)
    _measure(parts, (cells, asked.profile), compared, json_file, picture)


def _measure(
    parts: Parts,
    asked: tuple[list[StepCell], bool],
    peer: Peer,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Time the steps, print them as they come, write the files."""
    from gnomon.bench import step_report
    from gnomon.bench.ceilings import measure_ceilings
    from gnomon.bench.machine import describe_run
    from gnomon.bench.report import ceiling_line
    from gnomon.bench.result_files import write_json
    from gnomon.bench.step import bench_steps
    from gnomon.bench.step_inputs import fill_cache

    fill_cache(parts.cache, int(parts.info.resolved["seed"][0]))
    ceilings = measure_ceilings(parts.cache.device)
    typer.echo(ceiling_line(ceilings) + "\n" + step_report.HEADING)
    results, run = [], describe_run(parts.cache.device)
    run["model"] = parts.info.model_label
    run["providers"] = {name: provider for name, provider, *_ in parts.info.operators}
    max_tokens = int(parts.info.resolved["max_num_batched_tokens"][0])
    for result in bench_steps(parts, asked[0], max_tokens, asked[1]):
        results.append(result)
        typer.echo(step_report.result_line(result, peer, ceilings))
        layer = step_report.layer_lines(result, peer, ceilings)
        for line in (*layer, *step_report.kernel_lines(result)):
            typer.echo(line)
        if json_file is not None:
            write_json(json_file, step_report.as_json(results, peer, ceilings, run))
    if picture is not None:
        title = f"gnomon bench step {run['model']}, {run['machine']}"
        step_report.draw(results, peer, ceilings, picture, title)


def step_cells(kind: str, text: str) -> list[StepCell]:
    """The steps of "1x8192,64x512". ConfigError for other words, and for none of something."""
    from gnomon.bench.step import StepCell

    cells = []
    for word in (part.strip() for part in text.split(",")):
        batch, times, length = word.partition("x")
        is_read = times and batch.isdecimal() and length.isdecimal()
        if word and not (is_read and int(batch) and int(length)):
            raise ConfigError(
                f"--{kind} {text!r}: give batch x length by commas, both at least 1, as "
                "1x8192,64x512."
            )
        if word:
            cells.append(StepCell(kind, int(batch), int(length)))
    return cells


def _require_sense(config: EngineConfig, asked: StepsAsked) -> None:
    import torch

    if asked.profile and (config.device == "cpu" or not torch.cuda.is_available()):
        raise ConfigError("--profile lists kernels of a GPU, and this run has none. Leave it out.")
    for name in ("record", "shadow"):
        if getattr(config, name):
            raise ConfigError(f"{name} is for serving; a bench runs its steps bare. Leave it out.")
