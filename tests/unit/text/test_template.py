"""Chat templates in the sandbox: the text of transformers' engine, and no token of a user's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from gnomon.errors import RequestError
from gnomon.text.assets import default_tokenizer
from gnomon.text.encodings.base import ChatOptions, chat_options
from gnomon.text.encodings.template import TemplateEncoding

TOKENIZER = default_tokenizer("glm_moe_dsa")

# Uses most of what templates use, on what a user wrote.
TORTURE = """\
{%- macro shown(text) -%}
    {%- if text is string -%}{{- text -}}{%- else -%}{{- text | tojson -}}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(count=0, first='') -%}
[gMASK]<sop>{{ bos_token }}
{% for tool in tools or [] %}
{{ tool.function.name | upper }}: {{ tool | tojson(indent=1) }}
{{ tool.function.items() | map('first') | join(', ') }}
{% endfor %}
{%- for m in messages -%}
    {%- set ns.count = ns.count + 1 -%}
    {%- if loop.first -%}{%- set ns.first = m.content -%}{%- endif -%}
    {{- '<|' ~ m.role ~ '|>' if m.role != 'tool' else '<|observation|>' -}}
    {%- set body = shown(m.content) -%}
    {%- if m.role == 'assistant' -%}
        {% generation %}
        {%- if '</think>' in body -%}
            {%- set thoughts = body.split('</think>')[0].rstrip('\\n').split('<think>')[-1] -%}
            {%- set body = body.split('</think>')[-1].lstrip('\\n') -%}
            {{- '<think>' + thoughts.strip() + '</think>' -}}
        {%- endif -%}
        {{- body | trim -}}
        {%- for call in m.tool_calls or [] -%}
            {{- '\\n<tool_call>' + call.function.name -}}
            {%- for k, v in call.function.arguments.items() -%}
                <arg_key>{{ k }}</arg_key>
                {{- v if v is string else v | tojson(ensure_ascii=False) -}}
            {%- endfor -%}
        {%- endfor -%}
        {% endgeneration %}
    {%- elif body == ns.first and body.startswith('<') -%}
        {{- body[1:] | replace('|', '||') }} {{ [body, 'x', m.role] | join('+') -}}
        {%- continue -%}
    {%- else -%}
        {{- body }} {{ body | length }} {{ body | lower | capitalize }} {{ (body ~ '<sop>')[:5] -}}
        {%- set block %}{{ body }}<|user|>{% endset -%}
        {{- block if body | first != '<' else block | last -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{ '<think>' if enable_thinking else '</think>' }}
{%- endif -%}
"""

WORDS = st.lists(
    st.text("aſß <|>\n\"'é{%}", max_size=5) | st.sampled_from(sorted(TOKENIZER.added_tokens)),
    max_size=4,
).map("".join)
VALUES = st.recursive(
    WORDS | st.none() | st.booleans() | st.integers(), lambda inner: st.lists(inner, max_size=2)
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"name": WORDS.filter(bool), "arguments": st.dictionaries(WORDS, VALUES, max_size=3)}
    ),
    max_size=2,
)
FUNCTION = st.fixed_dictionaries(
    {"name": WORDS.filter(bool), "parameters": st.dictionaries(WORDS, VALUES, max_size=2)}
)
TOOLS = st.lists(
    FUNCTION.map(lambda function: {"type": "function", "function": function}), max_size=2
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation in which everybody may write anything."""
    messages = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(WORDS)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(WORDS)
        calls = draw(CALLS)
        if calls:
            answer["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        messages.append(answer)
        messages += [{"role": "tool", "content": draw(WORDS)} for _ in calls]
    return messages


def theirs(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """What transformers renders."""
    rendered, _ = render_jinja_template([copy.deepcopy(messages)], chat_template=template, **kwargs)
    return str(rendered[0])


TEMPLATES = {"torture": TORTURE, "glm": TOKENIZER.chat_template or ""}
ENCODINGS = {name: TemplateEncoding(TOKENIZER, text) for name, text in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations(), tools=TOOLS, thinks=st.booleans(), opens=st.booleans())
def test_text_is_that_of_transformers(
    name: str, messages: list[dict[str, Any]], tools: list[Any], thinks: bool, opens: bool
) -> None:
    options = ChatOptions(thinking=thinks, add_generation_prompt=opens)
    prompt = ENCODINGS[name].render(messages, tools=tools, options=options)
    expected = theirs(
        TEMPLATES[name],
        messages,
        tools=tools or None,
        add_generation_prompt=opens,
        enable_thinking=thinks,
        bos_token="",
    )
    assert prompt.text == expected
    assert prompt.starts_in_reasoning == (opens and thinks) or not opens


@given(messages=conversations(), last=WORDS.filter(str.strip))
def test_continuing_is_that_of_transformers(messages: list[dict[str, Any]], last: str) -> None:
    last = last.replace("</think>", "")
    if not last.strip():
        return
    messages = [*messages, {"role": "user", "content": "q"}, {"role": "assistant", "content": last}]
    prompt = ENCODINGS["glm"].render(messages, options=ChatOptions(continue_final_message=True))
    assert prompt.text == theirs(TEMPLATES["glm"], messages, continue_final_message=True)
    assert not prompt.starts_in_reasoning


def test_thoughts_can_be_continued() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "prefix": True},
    ]
    prompt = ENCODINGS["glm"].render(messages)
    assert prompt.text == "[gMASK]<sop><|user|>q<|assistant|><think>so"
    assert prompt.starts_in_reasoning


def test_what_a_template_refuses_is_the_requests_fault() -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
    encoding = TemplateEncoding(TOKENIZER, template)
    with pytest.raises(RequestError, match="refuses these messages: one only"):
        encoding.render([{"role": "user", "content": "x"}] * 2)
    bad = TemplateEncoding(TOKENIZER, "{{ messages[0].content | int(default=1) / 0 if tools }}")
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        bad.render([{"role": "user", "content": "x"}], tools=[{"function": {"name": "f"}}])


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"template_kwargs": {"clear_thinking": True}}, "chat_template_kwargs.clear_thinking"),
        ({"reasoning_effort": "none"}, "chat_template_kwargs.enable_thinking"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_options_that_a_template_does_not_read_are_refused(
    options: dict[str, Any], param: str
) -> None:
    always = TemplateEncoding(TOKENIZER, "{{ messages[0].content }}<|assistant|><think>")
    with pytest.raises(RequestError) as raised:
        always.render([{"role": "user", "content": "x"}], options=chat_options(**options))
    assert raised.value.param == param
    wished = chat_options({"enable_thinking": True})
    assert always.render([{"role": "user", "content": "x"}], options=wished).starts_in_reasoning


def test_options_that_it_reads_arrive() -> None:
    template = (
        "{{ reasoning_effort }},{{ enable_thinking }},{{ clear_thinking }},{{ colour | upper }},"
        "{{ messages[0].role }}{{ eos_token }}"
    )
    encoding = TemplateEncoding(TOKENIZER, template)
    options = chat_options({"colour": "<sop>", "clear_thinking": False}, reasoning_effort="high")
    prompt = encoding.render([{"role": "developer", "content": "x"}], options=options)
    assert prompt.text == "high,True,False,<SOP>,system<|endoftext|>"
    assert [part.value for part in prompt.segments if part.kind == "special"] == ["<|endoftext|>"]
