"""The HTTP application: which path does what.

In:  an engine that runs and the settings.
Out: `create_app`, a FastAPI app that answers as OpenAI's API does. Its schema is at /openapi.json;
     there is no /docs page, because FastAPI's would load its scripts from the internet.
Not here: the listening and the signals (serving.py), the endpoints themselves.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException

import gnomon
from gnomon.errors import GnomonError
from gnomon.server import answer_types as answers
from gnomon.server import chat, completions, openapi, status_routes, text_routes
from gnomon.server.engine_port import EnginePort
from gnomon.server.errors import ErrorDetail, Problem, problem_of
from gnomon.server.gate import Gate
from gnomon.server.metrics import ServerMetrics
from gnomon.server.openapi import describe
from gnomon.server.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gnomon.server.settings import ServerSettings
from gnomon.server.state import ServerState


def create_app(engine: EnginePort, settings: ServerSettings | None = None) -> FastAPI:
    """The app of one engine. Nothing is started or stopped here: the engine is the caller's."""
    state = ServerState(engine, settings or ServerSettings(), ServerMetrics(engine))
    app = FastAPI(
        title="gnomon",
        version=gnomon.__version__,
        description="An OpenAI-compatible server for sparse-attention models.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gnomon = state
    _add_routes(app)
    app.add_middleware(Gate, state=state)
    app.add_exception_handler(GnomonError, _on_gnomon_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _describe_types(app)
    return app


def _add_routes(app: FastAPI) -> None:
    """Every path. `{model:path}`: names of models may hold slashes."""
    probe: dict[str, Any] = {"responses": {503: {"description": "Not now; the body says why."}}}
    app.get("/health", **probe)(status_routes.health)
    app.get("/ready", **probe)(status_routes.ready)
    app.get("/metrics", response_class=PlainTextResponse)(status_routes.metrics)
    app.get("/server_info", **describe())(status_routes.server_info)
    app.post("/reset_prefix_cache", **describe())(status_routes.reset_prefix_cache)
    app.get("/v1/models", **describe(answer=answers.ModelList))(status_routes.models)
    one_model = describe(answer=answers.ModelCard, refusals=(401, 404, 503))
    one_model["openapi_extra"] = {"parameters": [_MODEL_PARAMETER]}
    app.get("/v1/models/{model:path}", **one_model)(status_routes.model)
    app.post(
        "/v1/chat/completions", **describe(ChatRequest, answers.ChatAnswer, answers.ChatChunk)
    )(chat.chat_completions)
    app.post("/v1/chat/completions/render", **describe(ChatRequest, answers.RenderAnswer))(
        text_routes.render
    )
    app.post(
        "/v1/completions",
        **describe(CompletionRequest, answers.CompletionAnswer, answers.CompletionAnswer),
    )(completions.completions)
    app.post("/tokenize", **describe(TokenizeRequest, answers.TokenizeAnswer))(text_routes.tokenize)
    app.post("/detokenize", **describe(DetokenizeRequest, answers.DetokenizeAnswer))(
        text_routes.detokenize
    )


_MODEL_PARAMETER = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
}


async def _on_gnomon_error(request: Request, error: Exception) -> Response:
    return problem_of(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = str(error.detail)
    if error.status_code == 404:
        known = ", ".join(sorted(request.app.openapi()["paths"]))
        message = f"there is nothing at {path}; this server has {known}, /openapi.json"
        if path in ("/docs", "/redoc"):
            message = "there is no page with documentation here, it would load scripts from the "
            message += "internet; the schema is at /openapi.json"
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}"
    detail = ErrorDetail(message, "invalid_request_error", None, f"http_{error.status_code}")
    answer = Problem(error.status_code, detail).response()
    answer.headers.update(error.headers or {})
    return answer


def _describe_types(app: FastAPI) -> None:
    """Make app.openapi() hold the schemas that the routes refer to."""
    derived = app.openapi

    def complete() -> dict[str, Any]:
        page = derived()
        page.setdefault("components", {}).setdefault("schemas", {}).update(openapi.components())
        return page

    app.openapi = complete  # type: ignore[method-assign]  # FastAPI's documented way to extend it
