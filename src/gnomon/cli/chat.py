"""`gnomon chat`: talk to a model in the terminal.

In:  lines that a person types, or that a pipe brings; a model to load, or the URL of a server.
Out: the answers as they come. /reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops
     an answer.
Not here: the HTTP side (sse_client.py), the engine (frontend/async_llm.py).
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from gnomon.cli.flags import ModelArgument, with_flags, with_model
from gnomon.cli.sampling_flags import SamplingFlags
from gnomon.cli.sse_client import ChatClient, Messages
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from gnomon.frontend.async_llm import AsyncLLM, DeltaIterator

EXAMPLES = """\b
Examples:
  gnomon chat                                 the small trained model that ships, in this process
  gnomon chat /models/GLM-5 --temperature 0.7
  gnomon chat --url http://localhost:8000     a server that runs already
  gnomon chat --quick "What is 378 + 256?"    one answer
"""
HELP = "/reset forgets the conversation, /exit ends, Ctrl-C stops an answer"


class Partner(Protocol):
    """Somebody who answers."""

    def reply(self, messages: Messages) -> Iterator[str]:
        """The pieces of the next answer."""
        ...

    def close(self) -> None:
        """The conversation is over."""
        ...


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chat", epilog=EXAMPLES)(
        with_flags(sampling=SamplingFlags, config=EngineConfig)(chat)
    )


def chat(
    model_argument: ModelArgument = None,
    url: Annotated[str | None, typer.Option(help="Talk to this server instead.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="GNOMON_API_KEY", help="The server's key.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    quick: Annotated[str | None, typer.Option(help="Ask this, print the answer, end.")] = None,
    *,
    sampling: SamplingFlags,
    config: EngineConfig,
) -> None:
    """Talk to a model in the terminal."""
    config = with_model(config, model_argument)
    partner = (
        _LocalPartner(config, sampling)
        if url is None
        else ChatClient(url, api_key, _remote_fields(sampling, config))
    )
    try:
        start: Messages = [] if system is None else [{"role": "system", "content": system}]
        if quick is not None:
            _answer(partner, [*start, {"role": "user", "content": quick}])
        else:
            _converse(partner, start)
    finally:
        partner.close()


def _converse(partner: Partner, start: Messages) -> None:
    """Turns until the end of the input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(HELP, file=sys.stderr)
    messages = list(start)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(partner, messages)})
            except RequestError as error:  # too long a conversation, for one
                print(f"gnomon: {error}", file=sys.stderr)
                messages.pop()


def _answer(partner: Partner, messages: Messages) -> str:
    """Print an answer as it comes; the whole of it, or as far as Ctrl-C let it come."""
    pieces: list[str] = []
    try:
        for piece in partner.reply(messages):
            print(piece, end="", flush=True)
            pieces.append(piece)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    return "".join(pieces)


def _remote_fields(sampling: SamplingFlags, config: EngineConfig) -> dict[str, object]:
    """The request fields of a remote chat: only what was given, the server has its defaults."""
    from gnomon.engine.flags import given_flags

    engine_flags = [name for name in config.given() if name != "model"]
    if engine_flags:
        raise ConfigError(
            f"--url is given, and {engine_flags[0]}, which is set where the server starts: "
            "leave one of them out."
        )
    fields: dict[str, object] = {"max_tokens": sampling.max_tokens, **given_flags(sampling)}
    if config.model is not None:
        fields["model"] = config.model
    return fields


class _LocalPartner:
    """An engine of our own. Its event loop runs while it answers."""

    def __init__(self, config: EngineConfig, sampling: SamplingFlags) -> None:
        from gnomon.cli.progress import LoadingDisplay
        from gnomon.frontend.async_llm import AsyncLLM

        sampling.params()  # refuses what is wrong before anything is loaded
        self._runner = asyncio.Runner()
        self._numbers = itertools.count()
        with LoadingDisplay(config.model or "the built-in model") as display:
            self._llm: AsyncLLM = AsyncLLM(config, display.report)
        self._params = sampling.params(defaults=self._llm.info.generation_defaults)

    def reply(self, messages: Messages) -> Iterator[str]:
        """The pieces of the next answer; Ctrl-C comes out as KeyboardInterrupt."""
        run = self._runner.run
        deltas = run(self._start(messages))
        try:
            while (text := run(_next_text(deltas))) is not None:
                yield text
        finally:
            run(deltas.aclose())

    def close(self) -> None:
        """End the engine."""
        self._llm.close()
        self._runner.close()

    async def _start(self, messages: Messages) -> DeltaIterator:
        ids = await self._llm.encode(messages)
        return await self._llm.start(ids, self._params, request_id=f"chat-{next(self._numbers)}")


async def _next_text(deltas: DeltaIterator) -> str | None:
    delta = await anext(deltas, None)
    return None if delta is None else delta.text
