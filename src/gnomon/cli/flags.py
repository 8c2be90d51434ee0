"""Commands whose flags are the annotated fields of configuration dataclasses.

In:  a function that takes such dataclasses, by keyword, beside its own typer parameters.
Out: `with_flags`, a decorator that gives the command one option per field; the function gets the
     dataclasses made and checked. `refuse_foreign_flags` answers flags that users of other
     engines type and that have another name or no meaning here.
Errors: ConfigError for a value (the dataclasses check themselves); typer's own for a type.
Not here: what the fields mean (engine/config.py, server/settings.py).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from gnomon.engine.config import EngineConfig, FlagSpec, flag_specs
from gnomon.errors import ConfigError

_PANELS: Final = {"EngineConfig": "Engine", "ServerSettings": "Server"}


def with_flags(**classes: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of dataclasses; each instance comes to it under its keyword."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if name not in classes
        ]
        specs = {keyword: flag_specs(made) for keyword, made in classes.items()}
        options = [
            _parameter(spec, _PANELS.get(classes[keyword].__name__, "Options"))
            for keyword in classes
            for spec in specs[keyword]
        ]

        def run(**given: Any) -> None:
            for keyword, made in classes.items():
                values = {spec.name: _value(spec, given.pop(spec.name)) for spec in specs[keyword]}
                given[keyword] = made(**values)
            command(**given)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *options)
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder, random:NAME,key=value, builtin:tiny_glm, or nothing: builtin:tiny.",
    ),
]


def with_model(config: EngineConfig, model: str | None) -> EngineConfig:
    """The config for a MODEL argument; it may also be given as --model, but not as another one."""
    if model is None:
        return config
    if config.model not in (None, model):
        raise ConfigError(f"MODEL is {model!r} and --model is {config.model!r}: give one of them.")
    return EngineConfig.of(**{**config.given(), "model": model})


def _parameter(spec: FlagSpec, panel: str) -> inspect.Parameter:
    """The typer parameter of one field."""
    spellings = list(spec.spellings)
    kind: Any = str if spec.type is dict else spec.type
    default = spec.default
    text = spec.help
    metavar = None
    if spec.type is dict:
        default, metavar = None, "JSON"
    elif spec.type is bool:
        long = spellings[0]
        spellings = [f"{long}/--no-{long.removeprefix('--')}", *spellings[1:]]
    elif spec.choices:
        metavar = "|".join(spec.choices)
    is_optional = spec.is_optional or spec.type is dict
    annotation: Any = Annotated[
        kind | None if is_optional else kind,
        typer.Option(*spellings, help=text, metavar=metavar, rich_help_panel=panel),
    ]
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _value(spec: FlagSpec, given: Any) -> Any:
    """The value of a field from what the command line gave."""
    if spec.type is not dict:
        return given
    if given is None:
        return {}
    try:
        value = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{spec.name} is {given!r}: it is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{spec.name} is {given!r}: a JSON object is expected.")
    return value


def refuse_foreign_flags(arguments: Sequence[str]) -> None:
    """ConfigError for the first flag of another engine that has no such name here."""
    own = OWN_FLAGS.get(arguments[0], ()) if arguments else ()
    for argument in arguments:
        name = argument.partition("=")[0]
        hint = FOREIGN_FLAGS.get(name)
        if hint is not None and name not in own:
            raise ConfigError(f"{name} is not a flag of gnomon: {hint}.")


_ONE_DEVICE = "this version runs on one device; leave it out"
_UNPARSED = "tool calls and thoughts are not parsed yet; the text arrives as it is"
_FOLDERS = "nothing is downloaded; give the folder of the model"
_NO_COMPILER = "nothing is compiled but kernels; leave it out"

OWN_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {"plan": ("--tp",)}
"""Flags of one command that are foreign to the others."""

FOREIGN_FLAGS: Final[Mapping[str, str]] = {
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--quantization": "it is read from config.json; leave it out",
    "-q": "it is read from config.json; leave it out",
    "--tokenizer-mode": "there is one tokenizer; leave it out",
    "--tool-call-parser": _UNPARSED,
    "--reasoning-parser": _UNPARSED,
    "--enable-auto-tool-choice": _UNPARSED,
    "--load-format": "checkpoints are safetensors; leave it out",
    "--download-dir": _FOLDERS,
    "--revision": _FOLDERS,
    "--swap-space": "preempted requests are computed again; leave it out",
    "--cpu-offload-gb": "weights stay where they are; leave it out",
    "--speculative-config": "there is no speculative decoding yet; leave it out",
    "--num-speculative-tokens": "there is no speculative decoding yet; leave it out",
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--enable-chunked-prefill": "it is always on; --max-prefill-chunk bounds the chunks",
    "--disable-log-requests": "prompts are not logged unless --log-requests is given",
    "--enable-log-requests": "use --log-requests",
    "--chat-template": "the model's own chat format is used; leave it out",
    "--guided-decoding-backend": "output cannot be constrained yet; leave it out",
    "--compilation-config": _NO_COMPILER,
    "-O": _NO_COMPILER,
    "--cuda-graph-sizes": "sizes of graphs follow from --max-num-seqs; leave it out",
    "--config": "configuration files are not read; give flags",
    "--uvicorn-log-level": "use --log-level",
    "--ssl-keyfile": "put a proxy in front that speaks TLS",
    "--ssl-certfile": "put a proxy in front that speaks TLS",
    "--root-path": "put a proxy in front that rewrites paths",
    "--allowed-origins": "put a proxy in front that sends CORS headers",
    "--model-path": "give the model as the argument: gnomon serve MODEL",
    "--context-length": "use --max-model-len",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--tp": "use -tp or --tensor-parallel-size",
    "--tp-size": "use -tp or --tensor-parallel-size",
    "--dp-size": "use -dp or --data-parallel-size",
    "--ep-size": "use --enable-expert-parallel",
    "--max-running-requests": "use --max-num-seqs",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--schedule-conservativeness": "a request that finds no page preempts; leave it out",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
}
