"""GLM's format without a template: equal to the template for 5, golden texts for 5.1 and 5.2."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError, RequestError
from gnomon.text.encodings.base import ChatOptions, chat_options
from gnomon.text.encodings.glm import DIALECTS, GlmEncoding
from gnomon.text.parsing.base import ContentDelta
from tests.unit.text.test_template import ENCODINGS, TOKENIZER, TOOLS, conversations

WRITERS = {version: GlmEncoding(TOKENIZER, version) for version in DIALECTS}


@given(conversations(), TOOLS, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_version_5_is_what_the_template_writes(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    thinks: bool,
    keeps: bool,
    opens: bool,
    continues: bool,
) -> None:
    continues = continues and not opens and messages[-1]["role"] == "assistant"
    options = ChatOptions(
        thinking=thinks,
        keep_thoughts=keeps,
        add_generation_prompt=opens,
        continue_final_message=continues and "tool_calls" not in messages[-1],
    )
    if options.continue_final_message:
        messages[-1] = {"role": "assistant", "content": "so" + messages[-1]["content"]}
        messages[-1]["content"] = messages[-1]["content"].replace("</think>", "").rstrip()
    written = WRITERS["5"].render(messages, tools=tools, options=options)
    assert written == ENCODINGS["glm"].render(messages, tools=tools, options=options)


FUNCTION = {"name": "f", "description": "é", "strict": True, "defer_loading": False}
TOOL = {"type": "function", "function": FUNCTION}
HEAD = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
CALLS = [
    {"id": "1", "function": {"name": "f", "arguments": '{"a": "x", "b": [1, null]}'}},
    {"id": "2", "function": {"name": "g", "arguments": "{}"}},
]
TALK = [
    {"role": "user", "content": " q "},
    {"role": "assistant", "content": " A1 ", "reasoning_content": " r1 "},
    {"role": "developer", "content": "d"},
    {"role": "user", "content": "w"},
    {"role": "assistant", "content": "", "reasoning_content": " r2 ", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "2", "content": "two"},
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "assistant", "content": "done"},
]
CALLED = (
    "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>"
    "<arg_key>b</arg_key><arg_value>[1, null]</arg_value></tool_call><tool_call>g</tool_call>"
)
ONE, TWO = "<tool_response>one</tool_response>", "<tool_response>two</tool_response>"


def text_of(version: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    prompt = WRITERS[version].render(messages, **kwargs)
    assert TOKENIZER.decode(TOKENIZER.encode_segments(prompt.segments)) == prompt.text
    return prompt.text


def test_each_version_in_its_own_way() -> None:
    assert text_of("5", TALK) == (
        "[gMASK]<sop><|user|> q <|assistant|></think>A1<|system|>d<|user|>w"
        f"<|assistant|><think>r2</think>{CALLED}<|observation|>{TWO}{ONE}"
        "<|assistant|></think>done<|assistant|><think>"
    )
    assert text_of("5.1", TALK) == (
        "[gMASK]<sop><|user|> q <|assistant|></think>A1<|system|>d<|user|>w"
        f"<|assistant|><think>r2</think>{CALLED}<|observation|>{TWO}{ONE}"
        "<|assistant|><think></think>done<|assistant|><think>"
    )
    assert text_of("5.2", TALK) == (
        "[gMASK]<sop><|system|>Reasoning Effort: Max"
        "<|user|> q <|assistant|><think></think>A1<|system|>d<|user|>w"
        f"<|assistant|><think> r2 </think>{CALLED}<|observation|>{ONE}{TWO}"
        "<|assistant|><think></think>done<|assistant|><think>"
    )


@pytest.mark.parametrize(
    ("version", "end"), [("5", "</think>"), ("5.1", "</think>"), ("5.2", "<think></think>")]
)
def test_thinking_off(version: str, end: str) -> None:
    for options in (
        chat_options({"enable_thinking": False}),
        chat_options(reasoning_effort="none"),
    ):
        prompt = WRITERS[version].render(TALK[:1], options=options)
        assert prompt.text == f"[gMASK]<sop><|user|> q <|assistant|>{end}"
        assert not prompt.starts_in_reasoning
    assert WRITERS[version].render(TALK[:1]).starts_in_reasoning


@pytest.mark.parametrize(("effort", "word"), [(None, "Max"), ("high", "High"), ("low", "Max")])
def test_effort_is_a_system_line_of_version_5_2(effort: str | None, word: str) -> None:
    text = text_of("5.2", TALK[:1], options=chat_options(reasoning_effort=effort))
    assert text.startswith(f"[gMASK]<sop><|system|>Reasoning Effort: {word}<|user|>")
    assert "Effort" not in text_of("5.1", TALK[:1], options=chat_options(reasoning_effort=effort))


def test_earlier_thoughts_are_kept_if_asked() -> None:
    kept = chat_options({"clear_thinking": False})
    assert "<think>r1</think>A1" in text_of("5", TALK, options=kept)
    assert "<think> r1 </think>A1" in text_of("5.2", TALK, options=kept)


def test_thoughts_in_the_content_are_told_apart() -> None:
    embedded = [TALK[0], {"role": "assistant", "content": "<think>\nr\n</think>\n\nA"}]
    assert "<|assistant|><think>r</think>A" in text_of("5", embedded)
    assert "<|assistant|><think>\nr\n</think>A" in text_of("5.2", embedded)


def test_tools() -> None:
    as_sent = '{"type": "function", "function": {"name": "f", "description": "é", "strict": true'
    assert f"{HEAD}{as_sent}" in text_of("5", TALK[:1], tools=[TOOL])
    unwrapped = f'{HEAD}{{"name": "f", "description": "é"}}\n</tools>\n\nFor each function call'
    assert unwrapped in text_of("5.1", TALK[:1], tools=[TOOL])
    later = {"type": "function", "function": {"name": "late", "defer_loading": True}}
    text = text_of("5.2", TALK[:1], tools=[later, TOOL])
    assert unwrapped in text, "a tool that is to be loaded later is left out"


@pytest.mark.parametrize(
    ("message", "options", "param"),
    [
        ({}, {"template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({}, {"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL]}, {}, "messages.0.tools"),
        ({"response_format": {"type": "text"}}, {}, "messages.0.response_format"),
        ({}, {"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_cannot_be_written_is_refused(
    message: dict[str, Any], options: dict[str, Any], param: str
) -> None:
    messages = [{"role": "system", "content": "s", **message}]
    for encoding in (WRITERS["5"], ENCODINGS["glm"]):
        with pytest.raises(RequestError) as raised:
            encoding.render(messages, options=chat_options(**options))
        assert raised.value.param == param


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"allowed are 5, 5\.1, 5\.2"):
        GlmEncoding(TOKENIZER, "6")


def test_stop_tokens_and_the_plain_parser() -> None:
    assert WRITERS["5"].stop_ids == TOKENIZER.eos_ids == ENCODINGS["glm"].stop_ids
    parser = WRITERS["5"].parser(starts_in_reasoning=True)
    assert parser.feed("a<think>", [1, 2]) == [ContentDelta("a<think>")]
    assert parser.feed("", [3]) == []
    assert parser.finish() == []
