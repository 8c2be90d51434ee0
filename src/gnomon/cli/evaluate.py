"""`gnomon eval needle|gsm8k|arithmetic`: ask a model questions whose answers are known.

In:  a model to load, with engine flags, or the URL of a running server; what to ask.
Out: a table on standard output, for needle a heat map too; --json and --picture write files. Exit
     code 0 whatever the score is: it is a measurement, not a verdict.
Not here: the evaluations (gnomon.evaluate), how results look (eval_display.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

import gnomon
from gnomon.cli.flags import ModelArgument, with_flags, with_model
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError
from gnomon.evaluate.arithmetic import ArithmeticSettings, run_arithmetic
from gnomon.evaluate.gsm8k import Gsm8kSettings, read_settings, run_gsm8k
from gnomon.evaluate.heat_map import check_picture, draw_heat_map
from gnomon.evaluate.needle import NeedleSettings, run_needle
from gnomon.evaluate.respondent import AskSettings, Progress, Respondent

if TYPE_CHECKING:
    from gnomon.evaluate.arithmetic import ArithmeticResult
    from gnomon.evaluate.gsm8k import Gsm8kResult
    from gnomon.evaluate.needle import NeedleResult

    Result = NeedleResult | Gsm8kResult | ArithmeticResult

T = TypeVar("T")

NEEDLE_EXAMPLES = """\b
Examples:
  gnomon eval needle                                 the small trained model that ships
  gnomon eval needle --lengths 512,4096 --samples 10 --picture needle.png
  gnomon eval needle --hf-overrides '{"index_topk": 1}'    see what selection is worth
  gnomon eval needle --url http://localhost:8000 --json needle.json
"""
GSM8K_EXAMPLES = """\b
Examples:
  gnomon eval gsm8k --data gsm8k_test.jsonl --shots gsm8k_train.jsonl --limit 100
  gnomon eval gsm8k --url http://localhost:8000 --data test.jsonl --num-shots 0
"""
ARITHMETIC_EXAMPLES = """\b
Examples:
  gnomon eval arithmetic
  gnomon eval arithmetic /models/GLM-5 --num-sums 600 --json sums.json
"""

ApiKey = Annotated[str | None, typer.Option(envvar="GNOMON_API_KEY", help="The server's key.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write scores and all answers here.")
]
PictureFile = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE.png", help="Draw the heat map (needs matplotlib)."),
]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Ask a model questions whose answers are known: needle, gsm8k, arithmetic.",
    )
    for name, settings, command, examples in (
        ("needle", NeedleSettings, needle, NEEDLE_EXAMPLES),
        ("gsm8k", Gsm8kSettings, gsm8k, GSM8K_EXAMPLES),
        ("arithmetic", ArithmeticSettings, arithmetic, ARITHMETIC_EXAMPLES),
    ):
        decorate = with_flags(settings=settings, ask=AskSettings, config=EngineConfig)
        group.command(name, epilog=examples)(decorate(command))
    app.add_typer(group, name="eval")


def needle(
    model_argument: ModelArgument = None,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
    picture: PictureFile = None,
    *,
    settings: NeedleSettings,
    ask: AskSettings,
    config: EngineConfig,
) -> None:
    """Find numbers planted at every depth of texts of several lengths."""
    from gnomon.cli.eval_display import print_needle

    _check_file(json_file)
    if picture is not None:
        check_picture(picture)
    config = with_model(config, model_argument)
    with _Asking("needle", config, ask, api_key) as asking:
        result = asking.run(lambda to, progress: run_needle(to, settings, ask, progress))
    print_needle(result, asking.title)
    asking.write(json_file, asdict(settings), result)
    if picture is not None:
        draw_heat_map(result, asking.title, picture)


def gsm8k(
    model_argument: ModelArgument = None,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
    *,
    settings: Gsm8kSettings,
    ask: AskSettings,
    config: EngineConfig,
) -> None:
    """Solve word problems of primary school, after worked examples."""
    from gnomon.cli.eval_display import print_gsm8k

    _check_file(json_file)
    read_settings(settings, ask.question_seed)  # files that do not serve are named before loading
    config = with_model(config, model_argument)
    with _Asking("gsm8k", config, ask, api_key) as asking:
        result = asking.run(lambda to, progress: run_gsm8k(to, settings, ask, progress))
    print_gsm8k(result, asking.title)
    asking.write(json_file, asdict(settings), result)


def arithmetic(
    model_argument: ModelArgument = None,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
    *,
    settings: ArithmeticSettings,
    ask: AskSettings,
    config: EngineConfig,
) -> None:
    """Add and subtract numbers of one to three digits."""
    from gnomon.cli.eval_display import print_arithmetic

    _check_file(json_file)
    config = with_model(config, model_argument)
    with _Asking("arithmetic", config, ask, api_key) as asking:
        result = asking.run(lambda to, progress: run_arithmetic(to, settings, ask, progress))
    print_arithmetic(result, asking.title)
    asking.write(json_file, asdict(settings), result)


class _Asking:
    """One run: opens the respondent, shows progress, writes the report."""

    def __init__(
        self, name: str, config: EngineConfig, ask: AskSettings, api_key: str | None
    ) -> None:
        self._name, self._config, self._ask, self._api_key = name, config, ask, api_key

    def __enter__(self) -> _Asking:
        self._respondent = open_respondent(self._config, self._ask, self._api_key)
        self.title = f"{self._name}: {self._respondent.label}, {self._respondent.place}"
        return self

    def __exit__(self, *_: object) -> None:
        self._respondent.close()

    def run(self, evaluation: Callable[[Respondent, Progress], T]) -> T:
        """The evaluation's result, with a progress bar."""
        from gnomon.cli.eval_display import AskingDisplay

        with AskingDisplay(self._name) as display:
            return evaluation(self._respondent, display.report)

    def write(self, path: Path | None, settings: dict[str, Any], result: Result) -> None:
        """The report as JSON, if a file was named."""
        if path is None:
            return
        report = {
            "evaluation": self._name,
            "gnomon": gnomon.__version__,
            "model": self._respondent.label,
            "place": self._respondent.place,
            "engine_flags": {} if self._ask.url else dict(self._config.given()),
            "ask": asdict(self._ask),
            "settings": settings,
            **result.as_json(),
        }
        text = json.dumps(report, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def open_respondent(config: EngineConfig, ask: AskSettings, api_key: str | None) -> Respondent:
    """The server that --url names, or the model in this process."""
    if ask.url is not None:
        from gnomon.evaluate.server_respondent import ServerRespondent

        engine_flags = [name for name in config.given() if name != "model"]
        if engine_flags:
            raise ConfigError(
                f"--url is given, and {engine_flags[0]}, which is set where the server starts: "
                "leave one of them out."
            )
        return ServerRespondent(ask, config.model, api_key)
    from gnomon.cli.progress import LoadingDisplay
    from gnomon.evaluate.engine_respondent import EngineRespondent
    from gnomon.frontend.llm import LLM

    flags: dict[str, Any] = dict(config.given())
    EngineRespondent.check(ask)
    with LoadingDisplay(config.model or "the built-in model") as display:
        llm = LLM(progress=display.report, **flags)
    return EngineRespondent(llm, ask)


def _check_file(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--json is {str(path)!r}: there is no folder of that name.")
