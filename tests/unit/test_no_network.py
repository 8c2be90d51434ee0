"""The guard of conftest.py: other machines are out of reach, this one is not."""

from __future__ import annotations

import socket

import pytest


@pytest.mark.parametrize("host", ["192.0.2.1", "example.org"])
def test_other_machines_are_out_of_reach(host: str):
    with pytest.raises(RuntimeError, match="may only talk to this machine"):
        socket.create_connection((host, 80), timeout=1)
    with socket.socket() as stream, pytest.raises(RuntimeError, match="this machine"):
        stream.connect_ex((host, 80))
    with (
        socket.socket(type=socket.SOCK_DGRAM) as datagram,
        pytest.raises(RuntimeError, match="this machine"),
    ):
        datagram.sendto(b"x", (host, 53))


def test_loopback_works():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("localhost", server.getsockname()[1])
        with socket.create_connection(address, timeout=5) as client:
            peer, _ = server.accept()
            with peer:
                client.sendall(b"ping")
                assert peer.recv(4) == b"ping"
