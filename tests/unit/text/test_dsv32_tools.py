"""DeepSeek-V3.2's tools, calls and results in DSML; and that nobody else's words become tokens."""

from __future__ import annotations

import json
from pathlib import Path

import deepseek_recipe as recipe

from gnomon.text.encodings.base import ChatOptions
from gnomon.text.encodings.dsv32 import Dsv32Encoding
from gnomon.text.segments import Segment
from gnomon.text.tokenizer import Tokenizer
from tests.unit.text.test_dsv32 import (
    ASSISTANT,
    BOS,
    ENCODING,
    EOS,
    TOKENIZER,
    TOOLS,
    USER,
    call,
    oracle,
    result,
    text_of,
    user,
)


def test_calls_are_written_as_deepseeks_encoder_writes_them() -> None:
    arguments = {"a": "x\n</｜DSML｜parameter>", "b": [1, {"é": None}], "c": 1.5, "d": ""}
    messages = [
        user("hi"),
        {"role": "assistant", "content": "c", "tool_calls": [call("1", "f", **arguments)]},
    ]
    written = ENCODING.render(messages, options=ChatOptions(add_generation_prompt=False))
    theirs = recipe.AssistantMessage(
        "c", None, [recipe.ToolCall("1", "f", json.dumps(arguments, ensure_ascii=False))]
    )
    expected = oracle([recipe.UserMessage("hi"), theirs], False)
    renamed = tuple(
        Segment(part.kind, part.value.replace("tool_calls>", "function_calls>"))
        for part in expected
    )
    assert written.segments == renamed[: len(written.segments)]
    assert written.segments[-1].value == EOS


TOOLS_TEXT = """## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part \
of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while \
lists and objects should use JSON format. The "string" attribute should be set to "true" for \
string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{"name": "f", "description": "é"}
{"name": "g"}
</functions>
"""


def test_tools_stand_behind_the_first_system_message_or_an_empty_one() -> None:
    behind = text_of([{"role": "system", "content": "Be brief."}, user("hi")], tools=TOOLS)
    assert behind == f"{BOS}Be brief.\n\n{TOOLS_TEXT}{USER}hi{ASSISTANT}</think>"
    alone = text_of([user("hi")], tools=TOOLS)
    assert alone == f"{BOS}\n\n{TOOLS_TEXT}{USER}hi{ASSISTANT}</think>"
    carried = text_of([{"role": "system", "content": "Be brief.", "tools": TOOLS}, user("hi")])
    assert carried == behind
    specials = ENCODING.render([user("hi")], tools=TOOLS).segments
    assert sum(part.value == "｜DSML｜" for part in specials if part.kind == "special") == 11


def test_a_developer_message_is_a_user_turn_that_may_carry_tools() -> None:
    developer = {"role": "developer", "content": "hi", "tools": TOOLS}
    assert text_of([developer]) == (
        f"{BOS}{USER}\n\n{TOOLS_TEXT}\n\n# The user's message is: hi{ASSISTANT}</think>"
    )


def test_results_follow_the_calls_with_a_thinking_tag_and_no_role() -> None:
    messages = [
        user("w"),
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "r",
            "tool_calls": [call("1", "f", q="x", n=3), call("2", "g")],
        },
        result("2", "two"),
        result("1", "one"),
    ]
    before = (
        f"{BOS}{USER}w{ASSISTANT}<think>r</think>\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="q" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜function_calls>{EOS}"
        "\n\n<function_results>\n<result>one</result>\n<result>two</result>\n</function_results>"
    )
    thinking = ENCODING.render(messages, options=ChatOptions(thinking=True))
    assert thinking.text == before + "\n\n<think>"
    assert thinking.starts_in_reasoning
    more = [*messages, {"role": "assistant", "content": "done", "reasoning_content": "s"}]
    followed = text_of([*more, user("n")], options=ChatOptions(thinking=True))
    assert followed == (
        before.replace("<think>r</think>", "</think>")
        + f"\n\n</think>done{EOS}{USER}n{ASSISTANT}<think>"
    ), "thoughts go with the next user turn"


def test_a_vocabulary_without_the_dsml_mark_writes_it_as_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    document = json.loads(Path(TOKENIZER.source).read_text(encoding="utf-8"))
    for token in document["added_tokens"]:
        token["content"] = token["content"].replace("｜DSML｜", "<|unused|>")
    path.write_text(json.dumps(document), encoding="utf-8")
    tokenizer = Tokenizer.from_file(path)
    prompt = Dsv32Encoding(tokenizer).render([user("hi")], tools=TOOLS)
    assert prompt.text == text_of([user("hi")], tools=TOOLS)
    assert tokenizer.decode(tokenizer.encode_segments(prompt.segments)) == prompt.text


def test_a_hostile_conversation_has_no_control_token_of_its_own() -> None:
    def control_ids(words: str) -> list[int]:
        messages = [
            {"role": "system", "content": words},
            user(words),
            {
                "role": "assistant",
                "content": words,
                "reasoning_content": words,
                "tool_calls": [call("1", words, **{words: words, "n": [words, {words: words}]})],
            },
            result("1", words),
            {"role": "developer", "content": words},
        ]
        tools = [{"type": "function", "function": {"name": words, "parameters": {words: words}}}]
        schema = {"type": "json_schema", "json_schema": {"schema": {words: [words]}}}
        options = ChatOptions(thinking=True, response_format=schema)
        prompt = ENCODING.render(messages, tools=tools, options=options)
        ids = TOKENIZER.encode_segments(prompt.segments)
        assert TOKENIZER.decode(ids) == prompt.text, "and nothing of it is lost"
        return [index for index in ids if index in TOKENIZER.added_tokens.values()]

    assert control_ids("".join(TOKENIZER.added_tokens)) == control_ids("harmless")
