"""What can be set about the server, beside the engine: one frozen dataclass, fields are flags.

In:  keyword arguments, as the command line gives them.
Out: a checked ServerSettings, or ConfigError that names field, value and what is allowed.
Not here: the engine's own configuration (engine/config.py), how flags are parsed (cli).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated as A
from typing import Any

from gnomon.engine.flags import Flag, Value, check_flags, from_flags, given_flags

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything that can be set about the server."""

    host: A[str, Flag("address to listen on; 0.0.0.0 is every interface")] = "127.0.0.1"
    port: A[int, Flag("port to listen on; 0 takes a free one", least=0, greatest=65535)] = 8000
    api_key: A[
        str | None,
        Flag("clients must send it as a Bearer token; several with commas. Or $GNOMON_API_KEY"),
    ] = None
    max_body_bytes: A[int, Flag("longest body of a request", least=1024)] = 32 * 2**20
    sse_keep_alive_s: A[
        float, Flag("a silent stream sends a comment so often, in seconds", least=0.01)
    ] = 15.0
    stream_interval: A[
        int,
        Flag(
            "tokens of a stream sent together; the first and last never wait, nor do stop strings",
            least=1,
        ),
    ] = 1
    log_requests: A[bool, Flag("write prompts and parameters to the log")] = False
    log_level: A[str, Flag("least severity that is logged", choices=LOG_LEVELS)] = "info"

    def __post_init__(self) -> None:
        check_flags(self)

    @classmethod
    def of(cls, **flags: Any) -> ServerSettings:
        """The settings of these flags; an unknown name is refused with the nearest known one."""
        return from_flags(cls, flags)

    def given(self) -> Mapping[str, Value]:
        """The fields that differ from their default."""
        return given_flags(self)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys, any of which opens the door; none if it is open."""
        return tuple(key for key in (self.api_key or "").split(",") if key)
