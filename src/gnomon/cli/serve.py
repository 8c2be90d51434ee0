"""`gnomon serve`: answer OpenAI clients over HTTP.

In:  a model and flags.   Out: a server, until a signal ends it; then exit code 0.
The address is taken first, then the model loads, then connections are accepted.
Not here: the app (server/app.py), the flags (EngineConfig, ServerSettings).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import typer

from gnomon.cli.flags import ModelArgument, with_flags, with_model
from gnomon.engine.config import EngineConfig
from gnomon.server.settings import ServerSettings

if TYPE_CHECKING:
    from gnomon.frontend.async_llm import AsyncLLM

Progress = Callable[[str, int, int], None]  # (stage, done, total)
SERVER = "gnomon.server.serving"
API_KEY_VARIABLE = "GNOMON_API_KEY"

EXAMPLES = """\b
Examples:
  gnomon serve                             the small trained model that ships
  gnomon serve /models/GLM-5 --port 9000   a folder in Hugging Face layout
  gnomon serve random:glm_moe_dsa,layers=4,seed=1
  gnomon serve --max-model-len 2048 --kv-cache-memory 512MiB --api-key secret
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", epilog=EXAMPLES)(
        with_flags(config=EngineConfig, settings=ServerSettings)(serve)
    )


def serve(
    model_argument: ModelArgument = None,
    *,
    config: EngineConfig,
    settings: ServerSettings,
) -> None:
    """Answer OpenAI clients over HTTP."""
    from gnomon.cli.progress import LoadingDisplay
    from gnomon.engine.launch import LOG_FORMAT
    from gnomon.frontend.async_llm import AsyncLLM
    from gnomon.server.address import bind

    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT)
    config = with_model(config, model_argument)
    if settings.api_key is None and os.environ.get(API_KEY_VARIABLE):
        settings = ServerSettings.of(
            **{**settings.given(), "api_key": os.environ[API_KEY_VARIABLE]}
        )
    with bind(settings) as sock:
        # Here and not in the event loop, so that Ctrl-C ends a long load at once.
        with LoadingDisplay(config.model or "the built-in model") as display:
            llm = AsyncLLM(config, _importing_meanwhile(display.report))
        asyncio.run(_serve(llm, settings, sock))


def _importing_meanwhile(report: Progress) -> Progress:
    """The same reports. Behind the first one the server is imported: the engine is on its way."""
    importing = threading.Thread(target=import_module, args=(SERVER,), daemon=True)

    def told(stage: str, done: int, total: int) -> None:
        if importing.ident is None:
            importing.start()
        report(stage, done, total)

    return told


async def _serve(llm: AsyncLLM, settings: ServerSettings, sock: socket.socket) -> None:
    from gnomon.server.address import url_of
    from gnomon.server.serving import serve as serve_engine

    name = llm.config.served_model_name or llm.info.model_label
    url = url_of(sock)

    def announce() -> None:
        print(f"serving {name} at {url}/v1 (Ctrl-C stops)", flush=True)

    async with llm:
        await serve_engine(llm, settings, sock, announce)
