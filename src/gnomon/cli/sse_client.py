"""A client for a chat server, with nothing but the standard library.

In:  the URL of an OpenAI-compatible server, a conversation.
Out: the text of the answer, piece by piece.
Errors: GnomonError with what the server said, or that there is none.
Not here: the terminal (chat.py).
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from gnomon.errors import ConfigError, GnomonError

Messages = list[dict[str, str]]


class ChatClient:
    """Talks to one server; a connection per answer."""

    def __init__(self, url: str, api_key: str | None, fields: dict[str, Any]) -> None:
        """`fields` go into every request beside the messages."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"url is {url!r}: give it as http://host:port.")
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fields = fields

    def reply(self, messages: Messages) -> Iterator[str]:
        """The pieces of the assistant's answer."""
        body = json.dumps({**self._fields, "messages": messages, "stream": True})
        connection = self._connection()
        try:
            connection.request(
                "POST", f"{self._base}/v1/chat/completions", body.encode(), self._headers
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise GnomonError(_message(answer.read(), answer.status))
            yield from _contents(answer)
        except (OSError, http.client.HTTPException) as error:
            raise GnomonError(f"no answer from {self._parts.geturl()}: {error}") from None
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing is held between answers."""

    def _connection(self) -> http.client.HTTPConnection:
        parts = self._parts
        assert parts.hostname is not None
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.hostname, parts.port)
        return http.client.HTTPConnection(parts.hostname, parts.port)


def _contents(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[str]:
    """The text of server-sent events up to [DONE]; comments are passed over."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise GnomonError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            yield (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _message(body: bytes, status: int) -> str:
    try:
        return f"the server answered {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}: {body[:200]!r}"
