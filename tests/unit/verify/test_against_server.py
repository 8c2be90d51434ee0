"""Servers that take and tell different things: every dialect is found, every refusal is explained.

A small HTTP server of the standard library plays them; its model repeats the last token and 7.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gnomon.errors import ConfigError
from gnomon.verify.against_server import CompletionServer, Question

Answer = tuple[int, Any]
Play = Callable[[dict[str, Any]], Answer]
QUESTION = Question((3, 4, 5), "three four five", 2)
MODELS = {"data": [{"id": "sun", "max_model_len": 512}, {"id": "moon"}]}


class Played:
    """A server that answers completions by `play`."""

    def __init__(self) -> None:
        self.play: Play = lambda fields: (200, {})
        self.models: Answer = (200, MODELS)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        played = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*played.models)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                fields = json.loads(self.rfile.read(length))
                played.asked.append(fields)
                played.keys.append(self.headers.get("Authorization"))
                self._send(*played.play(fields))

            def _send(self, status: int, found: Any) -> None:
                body = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def played() -> Iterator[Played]:
    server = Played()
    yield server
    server.stop()


def connect(played: Played, **options: Any) -> CompletionServer:
    return CompletionServer(played.url, wait=lambda seconds: None, **options)


def completion(fields: dict[str, Any], **changes: Any) -> Answer:
    """What a server says of two tokens, 5 and 7; with its prompt where it is echoed."""
    tokens, logprobs = [" five", " seven"], [-0.5, -0.25]
    if fields.get("echo"):
        tokens, logprobs = ["three", " four", " five", *tokens], [None, -3.0, -2.0, *logprobs]
    choice: dict[str, Any] = {"text": "".join(tokens), "logprobs": {
        "tokens": tokens, "token_logprobs": logprobs}}  # fmt: skip
    if fields.get("return_token_ids"):
        choice["token_ids"] = [5, 7]
    if "prompt_logprobs" in fields:
        choice["prompt_logprobs"] = [None, {"4": {"logprob": -3.0}}, {"5": {"logprob": -2.0}}]
    return 200, {"choices": [choice | changes], "usage": {"prompt_tokens": 3}}


def speaks(*names: str, takes_ids: bool = True) -> Play:
    """A server that knows these fields only, and refuses others."""
    known = {"model", "prompt", "max_tokens", "temperature", "logprobs", *names}

    def play(fields: dict[str, Any]) -> Answer:
        if fields.keys() - known:
            return 400, {"error": {"message": f"unknown {sorted(fields.keys() - known)}"}}
        if not takes_ids and not isinstance(fields["prompt"], str):
            return 422, {"detail": "prompt: str expected"}
        return completion(fields)

    return play


EXTRAS = ("return_token_ids", "ignore_eos")


@pytest.mark.parametrize(
    ("play", "dialect", "prompt", "ids"),
    [
        (speaks("prompt_logprobs", *EXTRAS), "token ids, prompt_logprobs", 3, [5, 7]),
        (speaks("echo", *EXTRAS), "token ids, echo", 3, [5, 7]),
        (speaks("echo"), "token ids, echo", 3, [None, None]),
        (speaks(), "token ids, no scored prompt", 0, [None, None]),
        (speaks("echo", takes_ids=False), "text, echo", 3, [None, None]),
        (speaks(takes_ids=False), "text, no scored prompt", 0, [None, None]),
    ],
)
def test_dialects(played: Played, play: Play, dialect: str, prompt: int, ids: list[int]) -> None:
    played.play = play
    server = connect(played)
    for _ in range(2):
        scored = server.score(QUESTION)
        assert [token.token_id for token in scored.output] == ids
        assert [token.logprob for token in scored.output] == [-0.5, -0.25]
        assert list(scored.prompt) == [None, -3.0, -2.0][:prompt]
    assert str(server.dialect) == dialect
    assert played.asked[-1].keys() == played.asked[-2].keys()  # found once, then kept
    assert played.asked[-1]["temperature"] == 0.0


def test_tokens_named_by_id(played: Played) -> None:
    named = {"tokens": ["token_id:5", "token_id:7"], "token_logprobs": [-0.5, -0.25]}
    played.play = lambda fields: completion(fields, logprobs=named, token_ids=None)
    assert [one.token_id for one in connect(played).score(QUESTION).output] == [5, 7]


def test_key_and_model(played: Played) -> None:
    played.play = speaks("echo")
    server = connect(played, model="moon", api_key="secret")
    assert (server.model, server.max_model_len) == ("moon", None)
    server.score(QUESTION)
    assert played.keys[-1] == "Bearer secret"
    assert connect(played).max_model_len == 512


def test_a_busy_server_is_asked_again(played: Played) -> None:
    answers = [(503, {"error": "loading"}), (429, {"error": "queue is full"})]
    played.play = lambda fields: answers.pop(0) if answers else completion(fields)
    assert len(connect(played).score(QUESTION).output) == 2
    assert len(played.asked) == 3


@pytest.mark.parametrize(
    ("play", "message"),
    [
        (lambda fields: completion(fields, logprobs=None), "gives no log-probabilities"),
        (lambda fields: (404, {"detail": "Not Found"}), "gives no log-probabilities.*Not Found"),
        (lambda fields: (401, {"error": {"message": "bad key"}}), "answered 401: bad key"),
        (lambda fields: (500, "<html>"), "answered 500"),
        (lambda fields: (200, "<html>"), "answered 502"),
        (lambda fields: (200, {"choices": []}), "no text completion with logprobs"),
    ],
)
def test_what_is_wrong_is_said(played: Played, play: Play, message: str) -> None:
    played.play = play
    with pytest.raises(ConfigError, match=message):
        connect(played).score(QUESTION)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((200, {"data": []}), "lists no model"),
        ((200, ["x"]), "lists no model"),
        ((403, {"error": {"message": "no key"}}), "answered 403: no key"),
    ],
)
def test_a_server_without_models(played: Played, models: Answer, message: str) -> None:
    played.models = models
    with pytest.raises(ConfigError, match=message):
        connect(played)


def test_a_model_that_is_not_served(played: Played) -> None:
    with pytest.raises(ConfigError, match="serves no 'stars'"):
        connect(played, model="stars")


def test_nobody_there() -> None:
    gone = Played()
    gone.stop()
    with pytest.raises(ConfigError, match="give it as http://host:port"):
        CompletionServer("ftp://host")
    with pytest.raises(ConfigError, match="Is the server running there"):
        CompletionServer(gone.url)
