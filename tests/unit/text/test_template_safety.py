"""Hostile messages and hostile templates: no token of a user's, no way out, no endless output."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from jinja2.exceptions import SecurityError

from gnomon.errors import CheckpointError, RequestError
from gnomon.text.encodings import jinja_sandbox
from gnomon.text.encodings.template import TemplateEncoding
from gnomon.text.encodings.traced import Tracer
from tests.unit.text.test_template import ENCODINGS, TEMPLATES, TOKENIZER, TOOLS, conversations

CONTROL_IDS = frozenset(TOKENIZER.added_tokens.values())
HARMLESS = str.maketrans(dict.fromkeys("".join(TOKENIZER.added_tokens), "#"))


def softened(value: Any) -> Any:
    """The same JSON without a character that a control token has; keys keep apart by number."""
    if isinstance(value, str):
        return value.translate(HARMLESS)
    if isinstance(value, list):
        return [softened(item) for item in value]
    if isinstance(value, dict):
        return {f"{n}{softened(key)}": softened(value[key]) for n, key in enumerate(value)}
    return value


def with_function(holder: dict[str, Any], change: Any) -> dict[str, Any]:
    """A tool or a tool call with each field of its function changed."""
    function = {key: change(value) for key, value in holder["function"].items()}
    return {**holder, "function": function}


def with_words(message: dict[str, Any], change: Any) -> dict[str, Any]:
    """A message with everything in it changed that its writer chose."""
    changed = copy.deepcopy(message)
    for key in ("content", "reasoning_content"):
        if key in changed:
            changed[key] = change(changed[key])
    if "tool_calls" in changed:
        changed["tool_calls"] = [with_function(call, change) for call in changed["tool_calls"]]
    return changed


def guarded(value: Any) -> Any:
    """Without what templates decide by: a closing tag in content, a first character `<`."""
    if isinstance(value, str):
        return "(" + value.replace("</think>", "") + ")"
    return value


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations(), tools=TOOLS)
def test_control_tokens_are_those_that_harmless_words_get(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    def control_ids(change: Any) -> list[int]:
        prompt = ENCODINGS[name].render(
            [with_words(message, lambda value: change(guarded(value))) for message in messages],
            tools=[with_function(tool, lambda value: change(guarded(value))) for tool in tools],
        )
        ids = TOKENIZER.encode_segments(prompt.segments)
        assert TOKENIZER.decode(ids) == prompt.text, "and nothing of it is lost"
        return [index for index in ids if index in CONTROL_IDS]

    assert control_ids(lambda value: value) == control_ids(softened)


def test_every_control_token_spelt_everywhere_gives_none() -> None:
    def control_ids(words: str) -> list[int]:
        call = {"function": {"name": words, "arguments": {words: words, "n": [{words: words}]}}}
        messages = [
            {"role": "system", "content": words},
            {"role": "user", "content": [{"type": "text", "text": words}] * 2},
            {
                "role": "assistant",
                "content": words,
                "reasoning_content": words,
                "tool_calls": [{"id": words, "type": "function", **call}],
            },
            {"role": "tool", "tool_call_id": words, "content": words},
        ]
        tools = [{"type": "function", "function": {"name": words, "parameters": {words: [words]}}}]
        prompt = ENCODINGS["glm"].render(messages, tools=tools)
        ids = TOKENIZER.encode_segments(prompt.segments)
        if words == hostile:
            naive = TOKENIZER.encode_with_specials(prompt.text)
            assert sum(map(CONTROL_IDS.__contains__, naive)) > 8 * len(CONTROL_IDS)
        return [index for index in ids if index in CONTROL_IDS]

    hostile = "".join(TOKENIZER.added_tokens)
    assert control_ids(hostile) == control_ids("harmless")
    assert control_ids(hostile[1:] + hostile[:1]) == control_ids("harmless")


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ ''.__class__ }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update(a=1) }}", "SecurityError"),
        ("{{ messages[0].content._real() }}", "SecurityError"),
        ("{{ messages[0].content._of_user.__globals__ }}", "SecurityError"),
        ("{{ '{0.__class__}'.format(messages) }}", "SecurityError"),
        ("{{ (messages[0].content ~ '{0.__class__}').format(messages) }}", "SecurityError"),
        ("{{ raise_exception.__globals__ }}", "SecurityError"),
        ("{{ 'x' * 100000000 }}", "SecurityError"),
        ("{{ 9 ** 99999999 }}", "SecurityError"),
        ("{% for i in range(99999999) %}x{% endfor %}", "OverflowError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ raise_exception('no') }}", "no"),
    ],
)
def test_a_template_that_breaks_out_or_breaks_is_refused_at_start(template: str, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        TemplateEncoding(TOKENIZER, template)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "MAX_RENDERED_CHARS", 10_000)
    template = (
        "{% macro m() %}{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}"
        "{% endmacro %}{{ m() | length }}"
    )
    encoding = TemplateEncoding(TOKENIZER, template)
    with pytest.raises(RequestError, match="more than 10000 characters") as raised:
        encoding.render([{"role": "user", "content": "xx"}])
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    "work",
    [
        "{% for a in t %}{% for b in t %}{% for c in t %}{% for d in t %}{% endfor %}{% endfor %}"
        "{% endfor %}{% endfor %}",
        "{% for a in range(99999) if t | length > 9 %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m([t | length, 100] | min) if t | length > 9 }}",
        "{{ (t | list * 1000) | map('upper') | map('length') | select('odd') | list | length }}",
        "{% for a in [1] recursive %}{{ loop([1, 1]) if t | length > 9 and loop.depth < 90 }}"
        "{% endfor %}",
    ],
    ids=["loops", "filtered", "macros", "filters", "recursive"],
)
def test_the_time_is_bounded(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these would go on for years, none is quick; short conversations are written."""
    monkeypatch.setattr(jinja_sandbox, "MAX_SECONDS", 0.2)
    encoding = TemplateEncoding(TOKENIZER, "{% set t = messages[0].content %}" + work + "{{ t }}")
    assert encoding.render([{"role": "user", "content": "x"}]).text.endswith("x")
    with pytest.raises(RequestError, match=r"more than 0\.2 s") as raised:
        encoding.render([{"role": "user", "content": "x" * 1000}])
    assert raised.value.param == "messages"
    assert encoding.render([{"role": "user", "content": "x"}]).text.endswith("x")


def test_filters_that_take_all_at_once_are_timed_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum takes six seconds of this clock: a third one is one too many."""
    clock = [0.0]

    def slow() -> Iterator[int]:
        clock[0] += 6.0
        yield 1

    monkeypatch.setattr(jinja_sandbox.time, "thread_time", lambda: clock[0])
    room = jinja_sandbox.TemplateRoom(Tracer((), "here"))
    template = room.from_string(
        "{% for _ in range(9) %}{{ values[loop.index0] | sum }}{% endfor %}"
    )
    with room.time_limit(), pytest.raises(SecurityError, match="more than 10 s"):
        template.render(values=[slow() for _ in range(9)])
    assert clock[0] == 12.0


def test_text_of_any_planes_survives() -> None:
    text = "\U000f0001\U0010ffff\ue000\U0001f98a é"
    prompt = ENCODINGS["glm"].render([{"role": "user", "content": text}])
    assert text in prompt.text
    assert TOKENIZER.decode(TOKENIZER.encode_segments(prompt.segments)) == prompt.text
