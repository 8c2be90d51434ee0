"""A server as a respondent: what goes over the wire, order, concurrency, faults of the server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gnomon.errors import ConfigError, GnomonError
from gnomon.evaluate.arithmetic import ArithmeticSettings, run_arithmetic
from gnomon.evaluate.needle import NeedleSettings, listed_share, run_needle
from gnomon.evaluate.respondent import AskSettings, Question, user
from gnomon.evaluate.server_respondent import ServerRespondent
from tests.unit.evaluate.partners import unheard
from tests.unit.evaluate.test_arithmetic import solve
from tests.unit.evaluate.test_needle import look_up

Reply = tuple[int, dict[str, str], Any]  # status, headers, body (bytes or JSON)


def completion(text: str | None, prompt: str = "") -> dict[str, Any]:
    """The body of an answer."""
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 5 + len(prompt) // 4,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


class FakeServer:
    """Speaks HTTP on loopback; `reply` makes the answer to a chat request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any] | None]] = []
        self.reply: Callable[[dict[str, Any]], Reply] = lambda body: (200, {}, completion("7"))
        self.models: Reply = (200, {}, {"data": [{"id": "m", "max_model_len": 900}, {"id": "n"}]})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None, outer.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(body, outer.reply(body))

            def _answer(self, body: dict[str, Any] | None, reply: Reply) -> None:
                outer.requests.append((self.path, dict(self.headers), body))
                status, headers, found = reply
                sent = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.requests if body is not None]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def answering(reply: Callable[[str], str]) -> Callable[[dict[str, Any]], Reply]:
    """Perfect or wrong answers to the last message."""

    def respond(body: dict[str, Any]) -> Reply:
        prompt = body["messages"][-1]["content"]
        counted = body["max_tokens"] == 1  # a prompt that only asks to be counted
        return 200, {}, completion("x" if counted else reply(prompt), prompt)

    return respond


def test_perfect_and_wrong_servers(fake: FakeServer) -> None:
    ask = AskSettings(url=fake.url, concurrency=3)
    grid = NeedleSettings(lengths="400,800", depths=3, keys=2, samples=1)
    fake.reply = answering(look_up)
    result = run_needle(ServerRespondent(ask), grid, ask, unheard)
    assert (result.score.share, result.score.num_cases) == (1.0, 6)
    assert listed_share(result.cases) is None
    fake.reply = answering(lambda prompt: str(solve(prompt)))
    sums = run_arithmetic(ServerRespondent(ask), ArithmeticSettings(num_sums=20), ask, unheard)
    assert sums.strict.share == 1.0  # so every answer came back to its question
    assert sums.usage.num_cached_tokens == 40
    fake.reply = answering(lambda prompt: str(solve(prompt) + 10))
    sums = run_arithmetic(ServerRespondent(ask), ArithmeticSettings(num_sums=20), ask, unheard)
    assert sums.flexible.share == 0.0


def test_what_goes_over_the_wire(fake: FakeServer) -> None:
    question = Question((user("hi"),), 9)
    ServerRespondent(AskSettings(url=fake.url + "/v1/"), api_key="k").ask([question], unheard)
    path, headers, body = fake.requests[-1]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k"
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "chat_template_kwargs": {"thinking": False, "enable_thinking": False},
    }
    ask = AskSettings(url=fake.url, thinking="auto", temperature=0.5, question_seed=4)
    ServerRespondent(ask, model="n").ask([question, question], unheard)
    official = {"model", "messages", "max_tokens", "temperature", "seed"}
    assert {frozenset(body) for body in fake.bodies[1:]} == {frozenset(official)}
    assert sorted(body["seed"] for body in fake.bodies[1:]) == [4, 5]
    assert fake.bodies[-1]["model"] == "n"


def test_what_the_server_says_about_itself(fake: FakeServer) -> None:
    respondent = ServerRespondent(AskSettings(url=fake.url.removeprefix("http://")))
    assert (respondent.label, respondent.max_model_len) == ("m", 900)
    assert respondent.place == fake.url
    assert ServerRespondent(AskSettings(url=fake.url), "n").max_model_len is None
    assert respondent.num_tokens([user("x" * 40)]) == 5
    assert fake.bodies[-1]["max_tokens"] == 1


def test_a_busy_server_is_asked_again(fake: FakeServer) -> None:
    waits: list[float] = []
    replies: list[Reply] = [
        (429, {"Retry-After": "2"}, {"error": {"message": "full"}}),
        (503, {}, b"down"),
        (429, {"Retry-After": "9999"}, b""),
        (200, {}, completion("7")),
    ]
    fake.reply = lambda body: replies.pop(0)
    respondent = ServerRespondent(AskSettings(url=fake.url), wait=waits.append)
    (answer,) = respondent.ask([Question((user("?"),), 2)], unheard)
    assert answer.text == "7"
    assert waits == [2.0, 0.4, 30.0]


def test_patience_ends(fake: FakeServer) -> None:
    fake.reply = lambda body: (503, {"Retry-After": "0"}, {"error": {"message": "draining"}})
    respondent = ServerRespondent(AskSettings(url=fake.url), wait=lambda _: None)
    with pytest.raises(GnomonError, match="503: draining"):
        respondent.ask([Question((user("?"),), 2)], unheard)


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        ((400, {}, {"error": {"message": "too long"}}), "400: too long"),
        ((500, {}, b"<html>"), "500: b'<html>'"),
        ((200, {}, b"<html>"), "200: b'<html>'"),
        ((200, {}, {"choices": []}), "no chat completion"),
        ((200, {}, {"choices": [{"message": {"content": "7"}}]}), "no chat completion"),
        ((200, {}, []), "no chat completion"),
    ],
)
def test_a_fault_ends_the_run(fake: FakeServer, reply: Reply, part: str) -> None:
    fake.reply = lambda body: reply
    respondent = ServerRespondent(AskSettings(url=fake.url, concurrency=1))
    with pytest.raises(GnomonError, match=part):
        respondent.ask([Question((user("?"),), 2)] * 50, unheard)
    assert len(fake.bodies) < 10  # the others were not sent


def test_an_empty_answer_is_an_answer(fake: FakeServer) -> None:
    fake.reply = lambda body: (200, {}, completion(None))
    (answer,) = ServerRespondent(AskSettings(url=fake.url)).ask(
        [Question((user("?"),), 2)], unheard
    )
    assert answer.text == ""


def test_no_server_and_no_url(fake: FakeServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(GnomonError, match="no answer from"):
        ServerRespondent(AskSettings(url=f"http://127.0.0.1:{free}"))
    for url in ("ftp://x", "http://", "http://:80"):
        with pytest.raises(ConfigError, match="url is"):
            ServerRespondent(AskSettings(url=url))
    fake.models = (200, {}, {"data": []})
    with pytest.raises(GnomonError, match="lists no model"):
        ServerRespondent(AskSettings(url=fake.url))
