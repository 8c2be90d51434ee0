"""What the endpoints share: the engine, the settings, the metrics, and whether the house closes.

In:  an engine that runs.
Out: `ServerState`, kept in `app.state.gnomon`; the one mutable thing in it is `is_draining`.
Not here: requests and answers.
"""

from __future__ import annotations

import itertools
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

from gnomon.errors import RequestError
from gnomon.server.engine_port import EnginePort
from gnomon.server.metrics import ServerMetrics
from gnomon.server.request_fields import UNSUPPORTED, GenerationRequest
from gnomon.server.settings import ServerSettings

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class ServerState:
    """One per app."""

    engine: EnginePort
    settings: ServerSettings
    metrics: ServerMetrics
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def model_name(self) -> str:
        """The name in /v1/models."""
        return self.engine.config.served_model_name or self.engine.info.model_label

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be taken."""
        return self.engine.is_healthy and not self.is_draining

    def check_model(self, name: str | None) -> None:
        """RequestError 404 for a model that is not served here."""
        if name is not None and name != self.model_name:
            raise RequestError(
                f"model {name!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
                status=404,
            )

    def check(self, body: GenerationRequest) -> None:
        """RequestError for what the model served or the way it is scheduled cannot honour."""
        self.check_model(body.model)
        policy = self.engine.config.scheduling_policy
        if body.priority and policy != "priority":
            raise RequestError(
                f"priority is {body.priority}, but this server schedules by {policy!r}; leave it "
                "out, or start the server with --scheduling-policy priority",
                param="priority",
                code=UNSUPPORTED,
            )

    def engine_id(self) -> str:
        """A name for a request inside the engine, unique in this process."""
        return f"r{next(self._numbers)}"


def state_of(request: Request) -> ServerState:
    """The state of the app that a request came to."""
    return cast(ServerState, request.app.state.gnomon)


def accepted_request_id(sent: str | None) -> str:
    """The client's X-Request-Id if it is 1 to 128 visible ASCII characters, else a new one."""
    return sent if sent and _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def request_id_of(request: Request) -> str:
    """The id that gate.py gave to a request."""
    return cast(str, request.scope["gnomon.request_id"])
