"""Every kind of bad request: a 4xx in OpenAI's shape that names the field, and no harm done."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from tests.server.conftest import RunningServer

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def post(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """(status, decoded answer)."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def refuse(server: RunningServer, path: str, body: bytes | dict[str, Any]) -> dict[str, Any]:
    """The error of a request that must be refused with 400."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = post(server.url + path, data)
    assert status == 400, answer
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    error: dict[str, Any] = answer["error"]
    return error


NESTED = "[" * 200 + "]" * 200

BROKEN = {
    "empty body": b"",
    "not JSON": b"{'messages': 1}",
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a list": b"[1, 2]",
    "a number": b"7",
    "cut off": b'{"messages": [{"role": "user", "con',
    "deep": b'{"messages": ' + NESTED.encode() + b"}",
    "deeper": b'{"messages": ' + b"[" * 100_000,
    "deep tools": b'{"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": '
    b'"function", "function": {"name": "f", "parameters": {"a": '
    + b'{"a": ' * 100
    + b"1"
    + b"}" * 100
    + b"}}}]}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_body_is_refused(server: RunningServer, name: str) -> None:
    error = refuse(server, CHAT, BROKEN[name])
    assert len(error["message"]) < 400


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0",
    ),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools.0"),
    (CHAT, {"messages": USER, "temperature": 3}, "temperature"),
    (CHAT, {"messages": USER, "temperature": "1"}, "temperature"),
    (CHAT, {"messages": USER, "top_p": 0}, "top_p"),
    (CHAT, {"messages": USER, "top_k": 1.5}, "top_k"),
    (CHAT, {"messages": USER, "n": 0}, "n"),
    (CHAT, {"messages": USER, "n": True}, "n"),
    (CHAT, {"messages": USER, "n": 10**6}, "n"),
    (CHAT, {"messages": USER, "seed": 2**63}, "seed"),
    (CHAT, {"messages": USER, "seed": 10**400}, "seed"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": 600}, "max_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": 600}, "max_completion_tokens"),
    (
        CHAT,
        {"messages": USER, "max_tokens": 4, "max_completion_tokens": 5},
        "max_completion_tokens",
    ),
    (CHAT, {"messages": USER, "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": USER, "stop": ["a"] * 10_000}, "stop"),
    (CHAT, {"messages": USER, "stop": ["a" * 100_000]}, "stop.0"),
    (CHAT, {"messages": USER, "stop": [""]}, "stop.0"),
    (CHAT, {"messages": USER, "stop": [1]}, "stop.0"),
    (CHAT, {"messages": USER, "stop_token_ids": [10**6]}, "stop_token_ids"),
    (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": USER, "logit_bias": {"999999": 1}}, "logit_bias"),
    (CHAT, {"messages": USER, "logit_bias": {"1": 101}}, "logit_bias.1"),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": USER, "stream": True, "stream_options": 1}, "stream_options"),
    (
        CHAT,
        {"messages": USER, "stream": True, "stream_options": {"include_use": True}},
        "stream_options.include_use",
    ),
    (
        CHAT,
        {"messages": USER, "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    (CHAT, {"messages": USER, "stream": "yes"}, "stream"),
    (CHAT, {"messages": USER, "reasoning_effort": "enormous"}, "reasoning_effort"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    (CHAT, {"messages": USER, "continue_final_message": True}, "continue_final_message"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, "prompt.1"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt.1"),
    (TEXT, {"prompt": [-1]}, "prompt.0"),
    (TEXT, {"prompt": [10**6]}, "prompt"),
    (TEXT, {"prompt": {"text": "a"}}, "prompt"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
]


@pytest.mark.parametrize(("path", "body", "param"), FAULTS)
def test_a_fault_is_named(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    error = refuse(server, path, body)
    assert error["param"] == param, error
    assert param.split(".")[0] in error["message"]


UNSUPPORTED: list[tuple[str, str, Any]] = [
    (CHAT, "response_format", {"type": "json_object"}),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "audio", {"voice": "alloy"}),
    (CHAT, "parallel_tool_calls", False),
    (CHAT, "best_of", 2),
    (CHAT, "use_beam_search", True),
    (CHAT, "store", True),
    (CHAT, "guided_json", {}),
    (CHAT, "priority", 1),
    (TEXT, "suffix", "the end"),
    (TEXT, "best_of", 3),
]


@pytest.mark.parametrize(("path", "name", "value"), UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: RunningServer, path: str, name: str, value: Any
) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "a"}
    error = refuse(server, path, {**body, name: value})
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"


def test_prompt_logprobs_cannot_be_streamed(server: RunningServer) -> None:
    error = refuse(server, TEXT, {"prompt": "a", "stream": True, "prompt_logprobs": 1})
    assert (error["param"], error["code"]) == ("prompt_logprobs", "unsupported_parameter")


def test_values_that_change_nothing_are_taken(server: RunningServer) -> None:
    neutral = {
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "store": False,
        "service_tier": "auto",
        "best_of": 1,
        "user": "somebody",
        "audio": None,
        "temperature": None,
        "stop": None,
    }
    body = {"messages": USER, "max_tokens": 1, **neutral}
    assert post(server.url + CHAT, json.dumps(body).encode())[0] == 200


def test_an_unknown_parameter_gets_the_nearest_known_one(server: RunningServer) -> None:
    error = refuse(server, CHAT, {"messages": USER, "temprature": 1})
    assert error["param"] == "temprature"
    assert error["code"] == "unknown_parameter"
    assert "temperature" in error["message"]


def test_a_prompt_over_the_context_names_both_numbers(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "north " * 600}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="sundial", messages=long)  # type: ignore[arg-type]
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="sundial", prompt=[5] * 512)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.message.count("512") >= 2


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_an_unknown_path_says_what_there_is(server: RunningServer) -> None:
    status, answer = post(server.url + "/v1/embeddings", b"{}")
    assert status == 404
    assert "/v1/chat/completions" in answer["error"]["message"]
    status, answer = post(server.url + "/health", b"{}")
    assert status == 405


def test_neighbours_of_bad_requests_keep_their_tokens(
    server: RunningServer, client: openai.OpenAI
) -> None:
    def neighbour() -> str:
        answer = client.completions.create(
            model="sundial", prompt="In peace", max_tokens=24, temperature=0.9, seed=11
        )
        return answer.choices[0].text

    quiet = neighbour()
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            for path, body, _ in FAULTS:
                post(server.url + path, json.dumps(body).encode())
                if stop.is_set():
                    return

    noise = threading.Thread(target=disturb)
    noise.start()
    try:
        assert neighbour() == quiet
    finally:
        stop.set()
        noise.join()
    server.wait_until_idle()
