"""The endpoints that look: health, readiness, metrics, models, the resolved configuration.

In:  requests without a body; one of them, /reset_prefix_cache, also does something.
Out: /health is 200 while the engine lives, /ready while a request would be taken (else 503);
     /server_info has every value of the configuration with where it came from. No key is shown.
Not here: anything that runs the model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from fastapi import Request, Response

import gnomon
from gnomon.errors import UnsupportedError
from gnomon.server.answer_types import ModelCard, ModelList
from gnomon.server.metrics import CONTENT_TYPE
from gnomon.server.state import ServerState, state_of


async def health(request: Request) -> Response:
    """Whether the engine lives."""
    state = state_of(request)
    is_alive = state.engine.is_healthy or state.is_draining
    return _status(is_alive, "ok", _why_not(state))


async def ready(request: Request) -> Response:
    """Whether a new request would be taken."""
    state = state_of(request)
    why = "shutting down" if state.is_draining else _why_not(state)
    return _status(state.is_ready, "ready", why)


async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    return Response(state_of(request).metrics.page(), headers={"Content-Type": CONTENT_TYPE})


async def models(request: Request) -> Response:
    """The one model that is served."""
    return _json(ModelList(data=[_card(state_of(request))]))


async def model(request: Request) -> Response:
    """The same by its name, which may hold slashes."""
    state = state_of(request)
    state.check_model(request.path_params["model"])
    return _json(_card(state))


async def server_info(request: Request) -> Response:
    """What runs here and why it is set so."""
    state = state_of(request)
    info = state.engine.info
    settings = dataclasses.asdict(state.settings)
    settings["api_key"] = None if settings["api_key"] is None else "set"
    shown: dict[str, Any] = {
        "version": gnomon.__version__,
        "model": {
            "name": state.model_name,
            "label": info.model_label,
            "type": info.model_type,
            "revision": info.revision,
            "folder": info.folder,
            "vocab_size": info.vocab_size,
            "max_model_len": info.max_model_len,
            "eos_token_ids": info.eos_token_ids,
            "generation_defaults": info.generation_defaults,
            "language": _language(state),
        },
        "engine": {
            name: {"value": value, "source": source, "reason": reason}
            for name, (value, source, reason) in info.resolved.items()
        },
        "operators": [
            {"operator": name, "provider": provider, "reason": why, "rejected": rejected}
            for name, provider, why, rejected in info.operators
        ],
        "cache": info.cache,
        "server": settings,
    }
    return _json(shown)


async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached pages that no request holds: a benchmark begins cold."""
    state_of(request).engine.reset_prefix_cache()
    return _json({"status": "ok"})


def _why_not(state: ServerState) -> str:
    """The engine's last words, or those about it: they name the step."""
    death = state.engine.death
    if death is None:
        return "the engine is going down"
    return f"the engine is dead ({death}); restart the server"


def _language(state: ServerState) -> str:
    """Tokenizer and chat encoding, and why; or that there are none."""
    try:
        return state.engine.language.reason
    except UnsupportedError as lack:
        return str(lack)


def _card(state: ServerState) -> ModelCard:
    info = state.engine.info
    return ModelCard(
        id=state.model_name,
        created=state.created,
        root=info.folder or info.model_label,
        max_model_len=info.max_model_len,
    )


def _status(is_fine: bool, fine: str, otherwise: str) -> Response:
    body = {"status": fine if is_fine else otherwise}
    return Response(
        msgspec.json.encode(body), 200 if is_fine else 503, media_type="application/json"
    )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
