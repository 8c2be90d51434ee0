"""Clients that vanish, and more clients than fit: pages come back, 429 says when to come again."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.conftest import RunningServer

LONG = {"prompt": "Count the hours", "max_tokens": 400, "ignore_eos": True}


def connect(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """Send a completion request by hand; the socket has not been read from."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    raw = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    raw.sendall(head.encode() + data)
    return raw


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_vanishes_frees_its_pages(
    server: RunningServer, streams: bool, choices: int
) -> None:
    server.wait_until_idle()
    aborted = server.metric("gnomon_request_success_total")
    raw = connect(server, {**LONG, "stream": streams, "n": choices})
    if streams:
        assert b"200" in raw.recv(64)
    server.wait_for("gnomon_num_requests_running", choices)
    assert server.metric("gnomon_kv_cache_usage_perc") > 0
    raw.close()
    server.wait_until_idle()
    server.wait_for("gnomon_request_success_total", aborted + choices)


def test_a_client_that_vanishes_while_it_sends(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    raw.close()
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_closing_a_stream_early_leaves_the_others_alone(
    server: RunningServer, client: openai.OpenAI
) -> None:
    def answer() -> str:
        made = client.completions.create(
            model="sundial", prompt="Stay", max_tokens=24, temperature=1, seed=5
        )
        return made.choices[0].text

    alone = answer()
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(answer)
        for _ in range(3):
            stream = client.completions.create(
                model="sundial", prompt="Go", max_tokens=400, stream=True
            )
            next(iter(stream))
            stream.close()
        assert kept.result() == alone
    server.wait_until_idle()


def test_a_full_queue_is_429_with_retry_after(server: RunningServer, client: openai.OpenAI) -> None:
    server.wait_until_idle()
    crowd = [connect(server, {**LONG, "n": 8, "stream": True}) for _ in range(3)]  # 8 + 16 places
    try:
        for raw in crowd:
            assert b"200" in raw.recv(64)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="sundial", prompt="Me too", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
        with pytest.raises(openai.RateLimitError):  # none of the prompts of a list is left behind
            client.completions.create(model="sundial", prompt=["a", "b"], max_tokens=1)
    finally:
        for raw in crowd:
            raw.close()
    server.wait_until_idle()
    assert client.completions.create(model="sundial", prompt="Now", max_tokens=1).choices
