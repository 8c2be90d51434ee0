"""Requests that are wrong, each refused with the place at fault; and what is let through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gnomon.errors import RequestError
from gnomon.text.encodings.base import ChatOptions, chat_options
from gnomon.text.messages import ToolCall, parse_messages, parse_tools, results_in_call_order


def nested(levels: int) -> Any:
    """A JSON value with that many lists inside each other."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def assistant_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"role": "function", "content": "x"}], "messages.0.role"),
        ([{"role": ["user"], "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
        ([{"role": "user", "content": nested(200)}], "messages.0.content.0"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "messages.0.content.1",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content.0"),
        ([{"role": "user", "content": "a\udc80"}], "messages.0.content"),
        ([{"role": "user", "content": "x", "audio": {"id": 1}}], "messages.0.audio"),
        ([{"role": "user", "content": "x", "tools": [{}]}], "messages.0.tools"),
        ([{"role": "assistant"}], "messages.0.content"),
        ([{"role": "assistant", "content": "x", "prefix": "yes"}], "messages.0.prefix"),
        (
            [
                {"role": "assistant", "content": "x", "prefix": True},
                {"role": "user", "content": ""},
            ],
            "messages.0.prefix",
        ),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages.0.tool_calls.0"),
        ([assistant_call("[1]")], "messages.0.tool_calls.0.function.arguments"),
        ([assistant_call("{")], "messages.0.tool_calls.0.function.arguments"),
        ([assistant_call('{"a": NaN}')], "messages.0.tool_calls.0.function.arguments"),
        ([assistant_call("[" * 100_000)], "messages.0.tool_calls.0.function.arguments"),
        ([assistant_call({"a": nested(200)})], "messages.0.tool_calls.0.function.arguments"),
        (
            [assistant_call('{"a": ' + "[" * 200 + "]" * 200 + "}")],
            "messages.0.tool_calls.0.function.arguments",
        ),
        ([{"role": "tool", "content": "x"}], "messages.0"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}], "messages.1"),
    ],
)
def test_wrong_messages(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_messages(messages, part_separator="")
    assert raised.value.param == param
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ([{"type": "function"}], "tools.0"),
        ([{"type": "web_search", "function": {"name": "f"}}], "tools.0"),
        ([{"function": {"name": ""}}], "tools.0.function.name"),
        ([{"function": {"name": 1}}], "tools.0.function.name"),
        ([{"function": {"name": "f", "parameters": []}}], "tools.0.function.parameters"),
        ([{"function": {"name": "f", "parameters": {"a": nested(200)}}}], "tools.0"),
        ([{"function": {"name": "f", "description": "\ud800"}}], "tools.0"),
    ],
)
def test_wrong_tools(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_tools(tools)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
        (
            {"template_kwargs": {"thinking": True, "enable_thinking": False}},
            "chat_template_kwargs.thinking",
        ),
        (
            {"template_kwargs": {"keep_thoughts": True, "clear_thinking": True}},
            "chat_template_kwargs.keep_thoughts",
        ),
        ({"template_kwargs": {"reasoning_effort": 3}}, "chat_template_kwargs.reasoning_effort"),
        (
            {"template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
            "reasoning_effort",
        ),
        ({"template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"template_kwargs": {"x": nested(200)}}, "chat_template_kwargs"),
        ({"response_format": {"x": nested(200)}}, "response_format"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        chat_options(**kwargs)
    assert raised.value.param == param


def test_options_under_the_names_that_users_know() -> None:
    assert chat_options() == ChatOptions()
    assert chat_options({"drop_thinking": False}).keep_thoughts is True
    assert chat_options({"clear_thinking": True}).keep_thoughts is False
    assert chat_options({"thinking": False, "other": 1}) == ChatOptions(
        thinking=False, template_kwargs={"other": 1}
    )


def test_what_a_client_echoes_is_let_through() -> None:
    echoed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning": "r",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}, "index": 0}
        ],
    }
    (message,) = parse_messages([echoed], part_separator="")
    assert message.content == ""
    assert message.reasoning == "r"
    assert message.tool_calls == (ToolCall("1", "f", {}),)


def test_parts_are_joined_as_the_encoding_says() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert parse_messages([message], part_separator="\n\n")[0].content == "a\n\nb"
    assert parse_messages([message], part_separator="")[0].content == "ab"


@pytest.mark.parametrize(
    ("call_ids", "result_ids", "order"),
    [
        (["1", "2", "3"], ["3", "1", "2"], "120"),
        (["1", "2"], ["2", None], "01"),
        ([None, "2"], ["2", "1"], "01"),
        (["1", "1"], ["1", "1"], "01"),
        (["1", "2"], ["2", "2"], "01"),
        (["1", "2"], ["2", "9"], "01"),
    ],
)
def test_results_are_sorted_only_where_it_is_certain(
    call_ids: list[Any], result_ids: list[Any], order: str
) -> None:
    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in call_ids]
    results = [
        {"role": "tool", "content": str(place), "tool_call_id": i}
        for place, i in enumerate(result_ids)
    ]
    parsed = parse_messages(
        json.loads(json.dumps([{"role": "assistant", "tool_calls": calls}, *results])),
        part_separator="",
    )
    ordered = results_in_call_order(parsed[0].tool_calls, parsed[1:])
    assert "".join(message.content for message in ordered) == order
