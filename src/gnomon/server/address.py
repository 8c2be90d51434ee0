"""The address that a server listens at, taken before its model is loaded.

In:  ServerSettings. Out: a bound socket, and how a client writes it.
Errors: ConfigError if the address cannot be had.
Not here: who listens (serving.py). This module imports nothing of the server's frameworks.
"""

from __future__ import annotations

import socket

from gnomon.errors import ConfigError
from gnomon.server.settings import ServerSettings


def bind(settings: ServerSettings) -> socket.socket:
    """Take the address now, so that a port in use is known before the model is loaded."""
    host, port = settings.host, settings.port
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host is {host!r}: {error.strerror}. Give an address of here.") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}. Give another --port (0 takes "
            "a free one) or --host."
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """The address of a bound socket as a client writes it."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
