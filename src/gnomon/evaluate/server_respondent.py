"""A respondent behind HTTP: any server with OpenAI's chat completions, from the standard library.

In:  a URL, AskSettings, the model's name (None: the first that /v1/models lists).
Out: answers, with the tokens that the server counted; index lists cannot be seen from outside.
Wire: official fields only, beside `chat_template_kwargs` (thinking, enable_thinking), which
`--thinking auto` leaves out. Not streamed. `concurrency` questions are under way at a time.
429 and 503 are tried again, after as long as Retry-After says; a broken connection once more.
Errors: ConfigError for a URL; GnomonError with what the server said, after which nothing is asked.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
from urllib.parse import urlsplit

from gnomon.errors import ConfigError, GnomonError
from gnomon.evaluate.respondent import (
    Answer,
    AskSettings,
    Message,
    Progress,
    Question,
    without_thoughts,
)

CONCURRENCY = 8
TIMEOUT_S = 600.0
BUSY = (429, 503)
MAX_BUSY = 20  # times that a question is put off
LONGEST_WAIT_S = 30.0


class ServerRespondent:
    """A model behind a URL."""

    def __init__(
        self,
        ask: AskSettings,
        model: str | None = None,
        api_key: str | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        url = ask.url or ""
        self._parts = urlsplit(url if "://" in url else f"http://{url}")
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ConfigError(f"url is {url!r}: give it as http://host:port.")
        self._base = self._parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._ask, self._wait = ask, wait
        self._model, self._max_model_len = self._find_model(model)

    @property
    def label(self) -> str:
        """The model's name."""
        return self._model

    @property
    def place(self) -> str:
        """The URL."""
        return self._parts.geturl()

    @property
    def max_model_len(self) -> int | None:
        """As /v1/models says, if it does."""
        return self._max_model_len

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt, which the server counts while it answers with one token."""
        return self._put(Question(tuple(messages), 1), 0).num_prompt_tokens

    def ask(self, questions: Sequence[Question], progress: Progress) -> list[Answer]:
        """The answers, in order. After an error no further question is sent."""
        progress(0, len(questions))
        pool = ThreadPoolExecutor(self._ask.concurrency or CONCURRENCY)
        try:
            running = [pool.submit(self._put, one, number) for number, one in enumerate(questions)]
            for done, future in enumerate(as_completed(running), 1):
                future.result()
                progress(done, len(questions))
            return [future.result() for future in running]
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Nothing is held between questions."""

    def _put(self, question: Question, number: int) -> Answer:
        """Ask one question."""
        fields: dict[str, Any] = {
            "model": self._model,
            "messages": list(question.messages),
            "max_tokens": question.max_tokens,
            "temperature": self._ask.temperature,
        }
        if self._ask.temperature > 0:
            fields["seed"] = self._ask.question_seed + number
        if self._ask.thinking != "auto":
            thinks = self._ask.thinking == "on"
            fields["chat_template_kwargs"] = {"thinking": thinks, "enable_thinking": thinks}
        return _answer(self._call("POST", "/v1/chat/completions", fields))

    def _find_model(self, model: str | None) -> tuple[str, int | None]:
        """(name, max_model_len): the named model, or the first; some servers name no length."""
        found = self._call("GET", "/v1/models", None)
        try:
            cards = {card["id"]: card.get("max_model_len") for card in found["data"]}
            name = next(iter(cards)) if model is None else model
        except (KeyError, TypeError, AttributeError, StopIteration):
            raise GnomonError(
                f"{self.place} lists no model at /v1/models: {found!r:.200}"
            ) from None
        return name, cards.get(name)

    def _call(self, verb: str, path: str, fields: dict[str, Any] | None) -> Any:
        """The JSON of an answer of status 200."""
        num_busy = num_broken = 0
        while True:
            try:
                status, headers, body = self._exchange(verb, path, fields)
            except (OSError, http.client.HTTPException) as error:
                num_broken += 1
                if num_broken > 1 or isinstance(error, ConnectionRefusedError):
                    raise GnomonError(f"no answer from {self.place}: {error!r}") from None
                continue
            num_busy += 1
            if status not in BUSY or num_busy > MAX_BUSY:
                return _json_of(status, body)
            self._wait(_seconds(headers.get("Retry-After"), num_busy))

    def _exchange(
        self, verb: str, path: str, fields: dict[str, Any] | None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        host, port = self._parts.hostname or "", self._parts.port
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(host, port, timeout=TIMEOUT_S)
        try:
            body = None if fields is None else json.dumps(fields).encode()
            connection.request(verb, self._base + path, body, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


def _seconds(retry_after: str | None, attempt: int) -> float:
    """How long to wait: what the server says, else 0.1 s and twice as long each time."""
    try:
        wanted = float(retry_after or "")
    except ValueError:
        wanted = 0.1 * 2**attempt
    return min(max(wanted, 0.0), LONGEST_WAIT_S)


def _json_of(status: int, body: bytes) -> Any:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if status == 200 and found is not None:
        return found
    try:
        said = found["error"]["message"]
    except (KeyError, TypeError):
        said = repr(body[:200])
    raise GnomonError(f"the server answered {status}: {said}")


def _answer(found: Any) -> Answer:
    """An Answer of a chat completion; GnomonError if it is none."""
    try:
        choice, usage = found["choices"][0], found["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text=without_thoughts(choice["message"]["content"] or ""),
            num_prompt_tokens=int(usage["prompt_tokens"]),
            num_output_tokens=int(usage["completion_tokens"]),
            num_cached_tokens=int(details.get("cached_tokens") or 0),
            finish_reason=str(choice["finish_reason"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise GnomonError(f"this is no chat completion with usage: {found!r:.300}") from None
