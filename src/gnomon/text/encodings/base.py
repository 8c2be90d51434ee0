"""The seam between a conversation and a prompt: what every chat encoding takes and gives.

In:  messages and tools of a request, and `ChatOptions`: all that may change how they are written.
Out: `ChatEncoding`, the protocol that server, CLI and offline use know; and what its
     implementations share.
Rule: an option is honoured or refused, never dropped. An encoding that has no such thing as, say,
effort levels says so in a RequestError that names the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gnomon.errors import RequestError
from gnomon.text.json_values import check_value
from gnomon.text.messages import ChatMessage, Tool
from gnomon.text.parsing.base import OutputParser
from gnomon.text.segments import RenderedPrompt, Segment

THINK_START = "<think>"
THINK_END = "</think>"

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a request says about the writing of its prompt. None: the encoding's own default.

    `thinking` opens a thinking block for the answer, or shuts it. `keep_thoughts` keeps the
    thoughts of earlier turns. `reasoning_effort` is one of EFFORTS; "none" is thinking off.
    `continue_final_message` leaves the last message, an assistant's, open. `response_format` is
    OpenAI's object. `template_kwargs` are variables for a Jinja template, by name.
    """

    thinking: bool | None = None
    keep_thoughts: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    response_format: Mapping[str, Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reasoning_effort is not None and self.reasoning_effort not in EFFORTS:
            raise RequestError(
                f"reasoning_effort is {self.reasoning_effort!r}; allowed are {', '.join(EFFORTS)}",
                param="reasoning_effort",
            )
        if self.thinking and self.reasoning_effort == "none":
            raise RequestError(
                "thinking is asked for, but reasoning_effort is 'none'; send one of them",
                param="reasoning_effort",
            )
        if self.response_format is not None:
            check_value(self.response_format, "response_format")

    def wants_thinking(self, default: bool) -> bool:
        """Whether the answer starts with thoughts: `thinking`, else the effort, else `default`."""
        if self.thinking is not None:
            return self.thinking
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return default


class ChatEncoding(Protocol):
    """The chat format of one checkpoint, bound to its tokenizer."""

    @property
    def name(self) -> str:
        """Short and stable: "dsv32", "glm-5", "jinja"."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's turn in this format."""
        ...

    def render(
        self, messages: Messages, *, tools: Tools | None = None, options: ChatOptions | None = None
    ) -> RenderedPrompt:
        """The prompt of a conversation. RequestError names what cannot be written and why."""
        ...

    def parser(self, *, starts_in_reasoning: bool, tools: Sequence[Tool] = ()) -> OutputParser:
        """A fresh parser for the output of one choice."""
        ...


def chat_options(
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    reasoning_effort: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    response_format: Mapping[str, Any] | None = None,
) -> ChatOptions:
    """ChatOptions from the parameters of a request, under the names that users know.

    Of `chat_template_kwargs` these mean the same for every family and are taken out:
    `thinking` and `enable_thinking`; `keep_thoughts`, and its opposites `clear_thinking` and
    `drop_thinking`; `reasoning_effort`. The others are left for a Jinja template.
    """
    rest = dict(template_kwargs or {})
    check_value(rest, "chat_template_kwargs")
    thinking = _take_flag(rest, {"thinking": True, "enable_thinking": True})
    kept = _take_flag(
        rest, {"keep_thoughts": True, "clear_thinking": False, "drop_thinking": False}
    )
    effort = rest.pop("reasoning_effort", None)
    if effort is not None and not isinstance(effort, str):
        raise RequestError(
            f"chat_template_kwargs.reasoning_effort is {effort!r}; a text is expected",
            param="chat_template_kwargs.reasoning_effort",
        )
    if effort is not None and reasoning_effort not in (None, effort):
        raise RequestError(
            f"reasoning_effort is {reasoning_effort!r}, but chat_template_kwargs says {effort!r}; "
            "send one of them",
            param="reasoning_effort",
        )
    return ChatOptions(
        thinking=thinking,
        keep_thoughts=kept,
        reasoning_effort=reasoning_effort if effort is None else effort,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        response_format=response_format,
        template_kwargs=rest,
    )


def continues_last(messages: Sequence[ChatMessage], options: ChatOptions) -> bool:
    """Whether the last message stays open. RequestError unless it is an assistant's plain text."""
    last = messages[-1]
    if not (options.continue_final_message or last.is_prefix):
        return False
    if last.role != "assistant" or last.tool_calls:
        what = "makes tool calls" if last.tool_calls else f"is of role {last.role}"
        raise RequestError(
            f"continue_final_message: {last.param} {what}; only the text of an assistant's "
            "message can be continued",
            param="continue_final_message",
        )
    return True


def ends_in_reasoning(segments: Sequence[Segment]) -> bool:
    """Whether the last thinking tag of a prompt opens a block: control tokens only count."""
    for segment in reversed(segments):
        if segment.kind == "special" and segment.value in (THINK_START, THINK_END):
            return segment.value == THINK_START
    return False


def _take_flag(kwargs: dict[str, Any], names: Mapping[str, bool]) -> bool | None:
    """Take the names out of kwargs; each is a truth value, turned round where `names` says False.

    RequestError if one is no truth value or two of them contradict each other.
    """
    found: dict[str, bool] = {}
    for name, is_direct in names.items():
        value = kwargs.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise RequestError(
                f"chat_template_kwargs.{name} is {value!r}; true or false is expected",
                param=f"chat_template_kwargs.{name}",
            )
        found[name] = value is is_direct
    if len(set(found.values())) > 1:
        raise RequestError(
            f"chat_template_kwargs: {' and '.join(found)} contradict each other; send one",
            param=f"chat_template_kwargs.{next(iter(found))}",
        )
    return next(iter(found.values()), None)
