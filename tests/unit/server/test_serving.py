"""Addresses: taken before anything else, and said plainly when they cannot be had."""

from __future__ import annotations

import pytest

from gnomon.errors import ConfigError
from gnomon.server.address import bind, url_of
from gnomon.server.settings import ServerSettings


def test_a_free_port_is_found() -> None:
    with bind(ServerSettings(port=0)) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    with bind(ServerSettings(host="0.0.0.0", port=0)) as sock:
        assert url_of(sock).startswith("http://localhost:")


def test_a_port_in_use_is_named() -> None:
    with bind(ServerSettings(port=0)) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*--port"):
            bind(ServerSettings(port=port))


def test_settings_say_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="port is 70000"):
        ServerSettings(port=70000)
    assert ServerSettings(api_key="a,b,").api_keys == ("a", "b")
    assert ServerSettings().api_keys == ()
