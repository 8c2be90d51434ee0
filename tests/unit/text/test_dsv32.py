"""DeepSeek-V3.2's format: DeepSeek's V4 encoder where the two agree, golden texts where not."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gnomon.errors import RequestError
from gnomon.text.assets import default_tokenizer
from gnomon.text.encodings.base import ChatOptions, chat_options
from gnomon.text.encodings.dsv32 import Dsv32Encoding
from gnomon.text.segments import RenderedPrompt, Segment

TOKENIZER = default_tokenizer("deepseek_v32")
ENCODING = Dsv32Encoding(TOKENIZER)
BOS, EOS, USER, ASSISTANT = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
)  # fmt: skip

WORDS = st.lists(
    st.text("ab é\n", max_size=4) | st.sampled_from(sorted(TOKENIZER.added_tokens)), max_size=4
).map("".join)
THOUGHTS = st.none() | WORDS
TURNS = st.lists(st.tuples(WORDS, WORDS, THOUGHTS), max_size=3)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def oracle(messages: list[Any], is_thinking: bool) -> tuple[Segment, ...]:
    """Segments by DeepSeek's encoder of V4, at the effort that adds no text."""
    conversation = recipe.Conversation(
        messages, thinking_mode=is_thinking, reasoning_effort="low" if is_thinking else None
    )
    rendered = recipe.DeepseekV4Encoding().render_conversation(conversation)
    segments, place = [], 0
    for start, stop in [*rendered.special_ranges, (len(rendered.prompt), len(rendered.prompt))]:
        if place < start:
            segments.append(Segment("text", rendered.prompt[place:start]))
        if start < stop:
            segments.append(Segment("special", rendered.prompt[start:stop]))
        place = stop
    return tuple(segments)


@example(None, [], "q", False, ("", "a"))  # found at 2,000 examples
@given(st.none() | WORDS, TURNS, WORDS, st.booleans(), st.none() | st.tuples(WORDS, THOUGHTS))
def test_conversations_are_written_as_deepseeks_encoder_writes_them(
    system: str | None,
    turns: list[tuple[str, str, str | None]],
    question: str,
    thinks: bool,
    prefix: tuple[str, str | None] | None,
) -> None:
    ours: list[dict[str, Any]] = []
    theirs: list[Any] = []
    if system is not None:
        ours.append({"role": "system", "content": system})
        theirs.append(recipe.SystemMessage(system))
    for asked, answered, thoughts in turns:
        ours.append(user(asked))
        answer = {"role": "assistant", "content": answered, "reasoning_content": thoughts}
        ours.append(answer)
        theirs += [recipe.UserMessage(asked), recipe.AssistantMessage(answered, thoughts)]
    ours.append(user(question))
    theirs.append(recipe.UserMessage(question))
    if prefix is not None:
        content, thoughts = prefix
        thoughts = thoughts or None  # V4's encoder takes the empty thought for none
        content = content or ("" if thoughts else "x")  # and writes no tag before nothing
        ours.append(
            {"role": "assistant", "content": content, "reasoning_content": thoughts, "prefix": True}
        )
        theirs.append(recipe.AssistantMessage(content, thoughts, prefix=True))
    prompt = ENCODING.render(ours, options=ChatOptions(thinking=thinks))
    assert prompt.segments == oracle(theirs, thinks)


TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é"}},
    {"type": "function", "function": {"name": "g"}},
]


def text_of(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """The prompt as a person reads it."""
    prompt: RenderedPrompt = ENCODING.render(messages, **kwargs)
    return prompt.text


@pytest.mark.parametrize(
    ("response_format", "text"),
    [
        ({"type": "text"}, ""),
        (
            {"type": "json_object"},
            "\n\nYou are a helpful assistant designed to output JSON.\n"
            "## Response Format:\n\nReply with JSON object ONLY.",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"é": 1}}},
            "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:"
            '\n{"é": 1}',
        ),
    ],
)
def test_response_formats(response_format: dict[str, Any], text: str) -> None:
    options = ChatOptions(response_format=response_format)
    messages = [{"role": "system", "content": "s"}, user("hi")]
    assert text_of(messages, options=options) == f"{BOS}s{text}{USER}hi{ASSISTANT}</think>"


def test_thinking_is_off_by_default_and_any_effort_turns_it_on() -> None:
    def ends_thinking(**kwargs: Any) -> bool:
        return ENCODING.render([user("x")], options=chat_options(**kwargs)).starts_in_reasoning

    assert not ends_thinking()
    assert not ends_thinking(reasoning_effort="none")
    assert ends_thinking(reasoning_effort="low")
    assert ends_thinking(template_kwargs={"enable_thinking": True})
    assert not ends_thinking(template_kwargs={"thinking": False, "reasoning_effort": "high"})


def test_without_a_generation_prompt_the_turn_is_not_opened() -> None:
    options = ChatOptions(add_generation_prompt=False)
    assert text_of([user("x")], options=options) == f"{BOS}{USER}x"
    ended = [user("x"), {"role": "assistant", "content": "y"}]
    assert text_of(ended, options=options) == f"{BOS}{USER}x{ASSISTANT}</think>y{EOS}"
    assert text_of(ended) == f"{BOS}{USER}x{ASSISTANT}</think>y{EOS}{ASSISTANT}</think>"


@pytest.mark.parametrize(
    ("messages", "kwargs", "param"),
    [
        (
            [user("a"), {"role": "assistant", "content": "", "tool_calls": [call("1", "f")] * 2},
             result("1", "x")],
            {}, "messages.2",
        ),
        ([user("a")], {"options": ChatOptions(keep_thoughts=True)}, "chat_template_kwargs"),
        ([user("a")], {"options": chat_options({"foo": 1})}, "chat_template_kwargs.foo"),
        ([user("a")], {"options": ChatOptions(continue_final_message=True)},
         "continue_final_message"),
        ([user("a")], {"options": ChatOptions(response_format={"type": "xml"})}, "response_format"),
        ([{"role": "system", "content": "", "tools": TOOLS}, user("a")], {"tools": TOOLS}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(
    messages: list[dict[str, Any]], kwargs: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as raised:
        ENCODING.render(messages, **kwargs)
    assert raised.value.param == param
