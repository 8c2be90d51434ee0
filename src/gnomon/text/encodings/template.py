"""A checkpoint's own Jinja chat template, rendered to segments.

In:  messages, tools, options.   Out: segments; the text is that of transformers' template engine.
A user's strings go through the template as Traced text (traced.py), so a control token in the
prompt is always one that the template itself wrote. Only roles are given plainly: they are
checked to be known words, and some templates build the role tokens from them.
Options: `thinking` sets enable_thinking (or thinking), `keep_thoughts` clear_thinking,
`reasoning_effort` itself, each if the template reads it. What a template does not read is refused.
A null content is given as the empty text, and a developer message as a system message where the
template knows no developer: templates would write the first as "None" and drop the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from gnomon.errors import CheckpointError, RequestError
from gnomon.text.encodings.base import (
    ChatOptions,
    Messages,
    Tools,
    continues_last,
    ends_in_reasoning,
)
from gnomon.text.encodings.jinja_sandbox import TemplateRefusal, TemplateRoom
from gnomon.text.encodings.traced import CUT_MARK, Tracer
from gnomon.text.messages import ChatMessage, Tool, parse_messages, parse_tools
from gnomon.text.parsing.base import OutputParser, PlainParser
from gnomon.text.segments import RenderedPrompt
from gnomon.text.tokenizer import Tokenizer

_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise by being used on data that it was not written for."""


class TemplateEncoding:
    """One chat template for one tokenizer. CheckpointError if it cannot write a single message."""

    name = "jinja"

    def __init__(
        self, tokenizer: Tokenizer, template: str, *, stop_tokens: Sequence[str] = ()
    ) -> None:
        self.stop_ids = (
            tuple(tokenizer.special_id(token) for token in stop_tokens) or tokenizer.eos_ids
        )
        self._tracer = Tracer(tokenizer.added_tokens, tokenizer.source)
        self._room = TemplateRoom(self._tracer)
        self._knows_developer = "developer" in template
        self._fixed = {"bos_token": _name_of(tokenizer, tokenizer.bos_id), "eos_token": ""}
        if tokenizer.eos_ids:
            self._fixed["eos_token"] = _name_of(tokenizer, tokenizer.eos_ids[0])
        try:
            self._variables = self._room.variables(template)
            self._template = self._room.from_string(template)
            self._run({"messages": [{"role": "user", "content": self._tracer.of_user("x")}]})
        except (*_FAULTS, TemplateRefusal) as fault:
            raise CheckpointError(
                f"the chat template beside {tokenizer.source} cannot write one user message: "
                f"{type(fault).__name__}: {fault}; fix chat_template.jinja, or remove it to use "
                "the encoding that gnomon has for this kind of model"
            ) from fault

    def render(
        self, messages: Messages, *, tools: Tools | None = None, options: ChatOptions | None = None
    ) -> RenderedPrompt:
        """The prompt of a conversation, as the template writes it."""
        options = options or ChatOptions()
        parsed = parse_messages(messages, part_separator="")
        for message in parsed:
            _refuse_extras(message)
        is_open = continues_last(parsed, options)
        variables = self._option_variables(options)
        variables["messages"] = self._message_variables(parsed, is_open)
        variables["tools"] = self._tool_variables(parse_tools(tools))
        variables["add_generation_prompt"] = options.add_generation_prompt and not is_open
        try:
            rendered = self._run(variables)
        except TemplateRefusal as refusal:
            raise RequestError(
                f"the chat template refuses these messages: {refusal}", param="messages"
            ) from refusal
        except _FAULTS as fault:
            raise RequestError(
                f"the chat template cannot write these messages: {type(fault).__name__}: {fault}",
                param="messages",
            ) from fault
        if is_open:
            rendered = _cut(rendered)
        out = self._tracer.segments(rendered)
        prompt = out.build(starts_in_reasoning=False)
        in_reasoning = ends_in_reasoning(prompt.segments)
        if options.add_generation_prompt and not is_open:
            self._check_thinking(options, in_reasoning)
        return RenderedPrompt(prompt.segments, in_reasoning)

    def parser(self, *, starts_in_reasoning: bool, tools: Sequence[Tool] = ()) -> OutputParser:
        """A parser that calls everything content."""
        return PlainParser()

    def _run(self, variables: Mapping[str, Any]) -> str:
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        with self._room.time_limit():
            return self._template.render({**self._fixed, **defaults, **variables})

    def _option_variables(self, options: ChatOptions) -> dict[str, Any]:
        variables = dict(self._tracer.of_user(dict(options.template_kwargs)))
        for name in options.template_kwargs:
            if name not in self._variables or name in ("messages", "tools", *self._fixed):
                raise RequestError(
                    f"chat_template_kwargs.{name} is not read by this model's chat template, "
                    f"which reads {', '.join(sorted(self._variables))}",
                    param=f"chat_template_kwargs.{name}",
                )
        if options.response_format and options.response_format.get("type") != "text":
            raise RequestError(
                "response_format: this model's chat template has no words for it; describe the "
                "format in a message",
                param="response_format",
            )
        if options.thinking is not None or options.reasoning_effort is not None:
            wanted = options.wants_thinking(default=True)
            switches = ("enable_thinking", "thinking")
            variables.update({name: wanted for name in switches if name in self._variables})
        if options.reasoning_effort not in (None, "none") and "reasoning_effort" in self._variables:
            variables["reasoning_effort"] = options.reasoning_effort
        if options.keep_thoughts is not None:
            if "clear_thinking" not in self._variables:
                raise RequestError(
                    "clear_thinking: this model's chat template has no choice about earlier "
                    "thoughts; leave it out",
                    param="chat_template_kwargs.clear_thinking",
                )
            variables["clear_thinking"] = not options.keep_thoughts
        return variables

    def _check_thinking(self, options: ChatOptions, in_reasoning: bool) -> None:
        """Without a switch in the template, thinking is as it is: a wish must agree with it."""
        if options.thinking is None and options.reasoning_effort is None:
            return
        has_switch = not self._variables.isdisjoint(("enable_thinking", "thinking"))
        wanted = options.wants_thinking(default=True)
        if not has_switch and wanted != in_reasoning:
            state = "on" if in_reasoning else "off"
            raise RequestError(
                f"thinking is always {state} in this model's chat template; leave out "
                "enable_thinking and reasoning_effort",
                param="chat_template_kwargs.enable_thinking",
            )

    def _message_variables(
        self, messages: Sequence[ChatMessage], is_open: bool
    ) -> list[dict[str, Any]]:
        variables = [self._one_message(message) for message in messages]
        if is_open:
            last = variables[-1]
            key = (
                "reasoning_content" if not last["content"] and messages[-1].reasoning else "content"
            )
            last[key] = last[key] + (CUT_MARK + " ")
        return variables

    def _one_message(self, message: ChatMessage) -> dict[str, Any]:
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        of_user = self._tracer.of_user
        variables: dict[str, Any] = {"role": role, "content": of_user(message.content)}
        optional = {
            "name": message.name,
            "reasoning_content": message.reasoning,
            "tool_call_id": message.tool_call_id,
        }
        variables.update(
            {key: of_user(value) for key, value in optional.items() if value is not None}
        )
        if message.tool_calls:
            variables["tool_calls"] = [
                {
                    "id": of_user(call.call_id),
                    "type": "function",
                    "function": of_user({"name": call.name, "arguments": dict(call.arguments)}),
                }
                for call in message.tool_calls
            ]
        return variables

    def _tool_variables(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        if not tools:
            return None
        return [
            self._tracer.of_user({**tool.definition, "function": dict(tool.function)})
            for tool in tools
        ]


def _cut(rendered: str) -> str:
    """The text before the mark at the end of a continued message.

    The mark was followed by a space: if that is gone, the template strips the message, so white
    space before the mark goes too.
    """
    before, mark, after = str.__str__(rendered).rpartition(CUT_MARK)
    if not mark:
        raise RequestError(
            "continue_final_message: the chat template does not write the last message",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _refuse_extras(message: ChatMessage) -> None:
    for name, value in (("tools", message.tools), ("response_format", message.response_format)):
        if value:
            raise RequestError(
                f"{message.param}.{name}: this model's chat template takes none in a message; "
                f"send {name} with the request",
                param=f"{message.param}.{name}",
            )


def _name_of(tokenizer: Tokenizer, index: int | None) -> str:
    return "" if index is None else tokenizer.id_to_token(index) or ""
