"""A server with OpenAI's text completions, asked for tokens and log-probabilities.

In:  a URL, the model's name (None: the first that /v1/models lists), an API key; prompts as token
     ids, and as text where there is a tokenizer.
Out: `Scored`: the greedy continuation, token by token with its log-probability, and, where the
     server offers it, the log-probability of each token of the prompt.
Servers differ in what they take and tell, so the first prompt is put in several ways (`DIALECTS`),
the most telling one first, until one is understood: ids or text; `prompt_logprobs` (vLLM, gnomon),
`echo` (OpenAI's own), or no scores of the prompt; fields beyond OpenAI's or none.
Errors: ConfigError that says what the server did and what would help; nothing is tried again but a
server that is busy (429, 503).
Not here: comparing (against.py).
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gnomon.errors import ConfigError

TIMEOUT_S = 600.0
BUSY = (429, 503)
MAX_BUSY = 20
NOT_UNDERSTOOD = (400, 404, 405, 415, 422, 501)
ID_PREFIX = "token_id:"  # how vLLM writes a token when asked for ids


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to put a prompt. `scoring`: "prompt_logprobs", "echo" or "" for none."""

    sends_ids: bool
    scoring: str
    has_extras: bool

    def __str__(self) -> str:
        words = ["token ids" if self.sends_ids else "text", self.scoring or "no scored prompt"]
        return ", ".join(words)


DIALECTS = (
    Dialect(True, "prompt_logprobs", True),
    Dialect(True, "echo", True),
    Dialect(True, "echo", False),
    Dialect(True, "", False),
    Dialect(False, "echo", False),
    Dialect(False, "", False),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt; `text` None where there is no tokenizer."""

    token_ids: tuple[int, ...]
    text: str | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the answer. `token_id` None where the server tells its text only."""

    token_id: int | None
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer. `prompt[i]`: log-probability of prompt token i, None where it was not told."""

    text: str
    output: tuple[ScoredToken, ...]
    prompt: tuple[float | None, ...]
    num_prompt_tokens: int | None


class CompletionServer:
    """A model behind a URL."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._parts = urlsplit(url if "://" in url else f"http://{url}")
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ConfigError(f"against is {url!r}: give it as http://host:port.")
        self._base = self._parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._wait = wait
        self._dialect: Dialect | None = None
        self.model, self.max_model_len = self._find_model(model)

    @property
    def url(self) -> str:
        """The URL."""
        return self._parts.geturl()

    @property
    def dialect(self) -> Dialect | None:
        """How prompts are put; None before the first one."""
        return self._dialect

    def score(self, question: Question) -> Scored:
        """The greedy answer with its log-probabilities."""
        refusals: list[str] = []
        for dialect in DIALECTS if self._dialect is None else (self._dialect,):
            if not dialect.sends_ids and question.text is None:
                continue
            status, found = self._call("POST", "/v1/completions", self._fields(dialect, question))
            if status == 200:
                scored = _scored(found, dialect, question)
                if scored is not None:
                    self._dialect = dialect
                    return scored
                refusals.append(f"{dialect}: an answer without logprobs")
            elif status in NOT_UNDERSTOOD:
                refusals.append(f"{dialect}: {status}, {_message(found)}")
            else:
                raise ConfigError(f"{self.url} answered {status}: {_message(found)}")
        raise ConfigError(
            f"{self.url} gives no log-probabilities for text completions, so nothing can be "
            f"compared. Tried {'; '.join(dict.fromkeys(refusals))}. Start the server so that it "
            "answers /v1/completions with logprobs."
        )

    def _fields(self, dialect: Dialect, question: Question) -> dict[str, Any]:
        ids: list[int] | str = list(question.token_ids)
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": ids if dialect.sends_ids else question.text,
            "max_tokens": question.max_tokens,
            "temperature": 0.0,
            "logprobs": 1,
        }
        if dialect.scoring == "echo":
            fields["echo"] = True
        if dialect.scoring == "prompt_logprobs":
            fields["prompt_logprobs"] = 1
        if dialect.has_extras:
            fields |= {"return_token_ids": True, "ignore_eos": True}
        return fields

    def _find_model(self, model: str | None) -> tuple[str, int | None]:
        status, found = self._call("GET", "/v1/models", None)
        if status != 200:
            raise ConfigError(f"{self.url}/v1/models answered {status}: {_message(found)}")
        try:
            cards = {card["id"]: card.get("max_model_len") for card in found["data"]}
        except (KeyError, TypeError, AttributeError):
            cards = {}
        if not cards:
            raise ConfigError(
                f"{self.url} lists no model at /v1/models ({found!r:.200}): is it a server with "
                "OpenAI's API?"
            )
        name = next(iter(cards)) if model is None else model
        if name not in cards:
            raise ConfigError(f"{self.url} serves no {name!r}. It lists {', '.join(cards)}.")
        limit = cards[name]
        return name, limit if isinstance(limit, int) else None

    def _call(self, verb: str, path: str, fields: dict[str, Any] | None) -> tuple[int, Any]:
        """(status, JSON or text)."""
        for attempt in range(MAX_BUSY + 1):
            try:
                status, body = self._exchange(verb, path, fields)
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(
                    f"no answer from {self.url} ({error!r}). Is the server running there?"
                ) from None
            if status not in BUSY or attempt == MAX_BUSY:
                break
            self._wait(min(30.0, 0.1 * 2**attempt))
        try:
            return status, json.loads(body)
        except ValueError:
            return (502 if status == 200 else status), repr(body[:200])

    def _exchange(self, verb: str, path: str, fields: dict[str, Any] | None) -> tuple[int, bytes]:
        is_secret = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_secret else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        try:
            body = None if fields is None else json.dumps(fields).encode()
            connection.request(verb, self._base + path, body, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _message(found: Any) -> str:
    """What a server says went wrong, in whichever of the usual places."""
    if isinstance(found, Mapping):
        error = found.get("error", found)
        said = error.get("message") if isinstance(error, Mapping) else error
        found = said or found.get("detail") or found
    return f"{found!s:.300}"


def _scored(found: Any, dialect: Dialect, question: Question) -> Scored | None:
    """The Scored of a completion; None if it has no logprobs."""
    try:
        choice = found["choices"][0]
        scores = choice["logprobs"]
        if not scores or not scores.get("token_logprobs"):
            return None
        texts, logprobs = list(scores["tokens"]), list(scores["token_logprobs"])
        usage = found.get("usage") or {}
        num_prompt = usage.get("prompt_tokens")
        prompt: list[float | None] = []
        if dialect.scoring == "echo":
            num_echoed = num_prompt if num_prompt is not None else len(question.token_ids)
            prompt = logprobs[:num_echoed]
            texts, logprobs = texts[num_echoed:], logprobs[num_echoed:]
        elif dialect.scoring == "prompt_logprobs":
            prompt = _prompt_scores(choice.get("prompt_logprobs"), question.token_ids)
        ids = choice.get("token_ids") or [_id_of(text) for text in texts]
        output = tuple(
            ScoredToken(index, text, float(logprob))
            for index, text, logprob in zip(ids, texts, logprobs, strict=True)
        )
        return Scored(str(choice["text"]), output, tuple(prompt), num_prompt)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"this is no text completion with logprobs ({error!r}): {found!r:.300}"
        ) from None


def _prompt_scores(found: Any, token_ids: Sequence[int]) -> list[float | None]:
    """VLLM's form: per token a mapping of ids to log-probabilities, null for the first."""
    scores: list[float | None] = []
    for entry, index in zip(found or (), token_ids, strict=False):
        own = None if entry is None else entry.get(str(index))
        scores.append(None if own is None else float(own["logprob"]))
    return scores


def _id_of(text: str) -> int | None:
    number = text.removeprefix(ID_PREFIX)
    return int(number) if text.startswith(ID_PREFIX) and number.isdecimal() else None
