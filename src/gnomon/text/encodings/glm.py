"""GLM-5, 5.1 and 5.2's chat format, for a folder that has no chat template.

In:  messages, tools, options.   Out: segments.
The format is that of the checkpoints' templates; its words are data that the models were trained
on. A role token is followed by the text with nothing between; what differs is in `GlmDialect`:

                            5                    5.1                       5.2
    tool definition         as it was sent       its function              its function
    turn without thoughts   </think>             <think></think> for the   <think></think>
                                                 current one if thinking
    thoughts                stripped             stripped                  as they are
    thinking off            </think>             </think>                  <think></think>
    effort                  none                 none                      a system line
    a defer_loading tool    written              written                   left out
    results                 as they were sent    as they were sent         in the order of the calls

Thinking is on unless asked otherwise. Thoughts before the last user message are dropped unless
keep_thoughts. An assistant's content may bring its thoughts along as <think>...</think> text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gnomon.errors import ConfigError, RequestError
from gnomon.text.encodings.base import (
    THINK_END,
    THINK_START,
    ChatOptions,
    Messages,
    Tools,
    continues_last,
)
from gnomon.text.json_values import to_json
from gnomon.text.messages import (
    ChatMessage,
    Tool,
    ToolCall,
    parse_messages,
    parse_tools,
    results_in_call_order,
)
from gnomon.text.parsing.base import OutputParser, PlainParser
from gnomon.text.segments import PromptBuilder, RenderedPrompt
from gnomon.text.tokenizer import Tokenizer

START: Final = ("[gMASK]", "<sop>")
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
OBSERVATION: Final = "<|observation|>"
STOP_TOKENS: Final = ("<|endoftext|>", USER, OBSERVATION)
_MARKS: Final = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_response>", "</tool_response>", THINK_START, THINK_END,
)  # fmt: skip

_TOOLS_BEFORE: Final = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_AFTER: Final = (
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n"
)
_CALL_EXAMPLE: Final = (
    "<tool_call>", "{function-name}",
    "<arg_key>", "{arg-key-1}", "</arg_key>", "<arg_value>", "{arg-value-1}", "</arg_value>",
    "<arg_key>", "{arg-key-2}", "</arg_key>", "<arg_value>", "{arg-value-2}", "</arg_value>",
    "...", "</tool_call>",
)  # fmt: skip
_HIDDEN_TOOL_FIELDS: Final = ("defer_loading", "strict")


@dataclass(frozen=True, slots=True)
class GlmDialect:
    """What one version does its own way; see the table of the module."""

    unwraps_tools: bool
    strips_thoughts: bool
    empty_block: str
    """Where a turn without thoughts has <think></think> and not </think>: never, current, all."""
    is_newer: bool
    """Has effort levels, leaves out tools to be loaded later, puts results in call order."""


DIALECTS: Final[Mapping[str, GlmDialect]] = {
    "5": GlmDialect(False, True, "never", False),
    "5.1": GlmDialect(True, True, "current", False),
    "5.2": GlmDialect(True, False, "all", True),
}


class GlmEncoding:
    """The chat encoding of one GLM version for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, version: str = "5") -> None:
        if version not in DIALECTS:
            raise ConfigError(
                f"GLM version {version!r} is not known; allowed are {', '.join(DIALECTS)}"
            )
        for token in (*START, SYSTEM, USER, ASSISTANT, OBSERVATION, *_MARKS):
            tokenizer.special_id(token)
        self.name = f"glm-{version}"
        self.stop_ids = tuple(tokenizer.special_id(token) for token in STOP_TOKENS)
        self._dialect = DIALECTS[version]

    def render(
        self, messages: Messages, *, tools: Tools | None = None, options: ChatOptions | None = None
    ) -> RenderedPrompt:
        """The prompt of a conversation; see the module for the rules."""
        options = options or ChatOptions()
        self._refuse_foreign_options(options)
        parsed = parse_messages(messages, part_separator="")
        return _Writer(parsed, options, self._dialect).write(parse_tools(tools))

    def parser(self, *, starts_in_reasoning: bool, tools: Sequence[Tool] = ()) -> OutputParser:
        """A parser that calls everything content."""
        return PlainParser()

    def _refuse_foreign_options(self, options: ChatOptions) -> None:
        for name in options.template_kwargs:
            raise RequestError(
                f"chat_template_kwargs.{name} is not known to {self.name}; allowed are "
                "enable_thinking, clear_thinking and reasoning_effort",
                param=f"chat_template_kwargs.{name}",
            )
        if options.response_format and options.response_format.get("type") != "text":
            raise RequestError(
                f"response_format: {self.name} has no words for it; describe the format in a "
                "message",
                param="response_format",
            )


class _Writer:
    """Writes one conversation, message by message."""

    def __init__(
        self, messages: tuple[ChatMessage, ...], options: ChatOptions, dialect: GlmDialect
    ) -> None:
        self._messages = messages
        self._options = options
        self._dialect = dialect
        self._is_open = continues_last(messages, options)
        self._is_thinking = options.wants_thinking(default=True)
        self._last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
        self._out = PromptBuilder()

    def write(self, tools: Sequence[Tool]) -> RenderedPrompt:
        for token in START:
            self._out.special(token)
        if self._dialect.is_newer and self._is_thinking:
            level = "High" if self._options.reasoning_effort == "high" else "Max"
            self._out.special(SYSTEM)
            self._out.text(f"Reasoning Effort: {level}")
        if tools:
            self._tools(tools)
        in_reasoning = False
        for place, message in enumerate(self._messages):
            if message.role in ("system", "developer"):
                self._plain_turn(SYSTEM, message)
            elif message.role == "user":
                self._plain_turn(USER, message)
            elif message.role == "assistant":
                in_reasoning = self._assistant(place, message)
            elif self._messages[place - 1].role != "tool":
                self._results(place)
        if self._options.add_generation_prompt and not self._is_open:
            self._out.special(ASSISTANT)
            in_reasoning = self._is_thinking
            if in_reasoning or self._dialect.empty_block == "all":
                self._out.special(THINK_START)
            if not in_reasoning:
                self._out.special(THINK_END)
        return self._out.build(starts_in_reasoning=in_reasoning)

    def _tools(self, tools: Sequence[Tool]) -> None:
        self._out.special(SYSTEM)
        self._out.text(_TOOLS_BEFORE)
        for tool in tools:
            definition: Mapping[str, Any] = tool.definition
            if self._dialect.is_newer and tool.function.get("defer_loading"):
                continue
            if self._dialect.unwraps_tools:
                hidden = _HIDDEN_TOOL_FIELDS
                definition = {k: v for k, v in tool.function.items() if k not in hidden}
            self._out.text(to_json(definition) + "\n")
        self._out.text(_TOOLS_AFTER)
        for piece in _CALL_EXAMPLE:
            (self._out.special if piece in _MARKS else self._out.text)(piece)

    def _plain_turn(self, role_token: str, message: ChatMessage) -> None:
        for name, value in (("tools", message.tools), ("response_format", message.response_format)):
            if value:
                raise RequestError(
                    f"{message.param}.{name}: a GLM message carries none; send {name} with the "
                    "request",
                    param=f"{message.param}.{name}",
                )
        self._out.special(role_token)
        self._out.text(message.content)

    def _assistant(self, place: int, message: ChatMessage) -> bool:
        """Write a turn; whether it was left open inside its thoughts."""
        is_open = self._is_open and place == len(self._messages) - 1
        thoughts, content = self._split_thoughts(message)
        is_current = place > self._last_user
        self._out.special(ASSISTANT)
        shown = thoughts if is_current or self._options.keep_thoughts else None
        if self._dialect.strips_thoughts and not shown:
            shown = None
        if shown is not None:
            self._out.special(THINK_START)
            self._out.text(shown.strip() if self._dialect.strips_thoughts else shown)
            if is_open and not content:
                return True
        elif self._dialect.empty_block == "all" or (
            self._dialect.empty_block == "current" and is_current and self._is_thinking
        ):
            self._out.special(THINK_START)
        self._out.special(THINK_END)
        self._out.text(content.strip())
        for call in message.tool_calls:
            self._call(call)
        return False

    def _split_thoughts(self, message: ChatMessage) -> tuple[str | None, str]:
        """A message's thoughts and its content, which may hold them between its own tags."""
        content = message.content
        if message.reasoning is not None or THINK_END not in content:
            return message.reasoning, content
        before, after = content.split(THINK_END)[0], content.split(THINK_END)[-1]
        if self._dialect.strips_thoughts:
            before, after = before.rstrip("\n"), after.lstrip("\n")
            return before.split(THINK_START)[-1].lstrip("\n"), after
        return before.split(THINK_START)[-1], after

    def _call(self, call: ToolCall) -> None:
        out = self._out
        out.special("<tool_call>")
        out.text(call.name)
        for key, value in call.arguments.items():
            out.special("<arg_key>")
            out.text(key)
            out.special("</arg_key>")
            out.special("<arg_value>")
            out.text(value if isinstance(value, str) else to_json(value))
            out.special("</arg_value>")
        out.special("</tool_call>")

    def _results(self, first: int) -> None:
        """Results that stand together share one role token."""
        last = first
        while last + 1 < len(self._messages) and self._messages[last + 1].role == "tool":
            last += 1
        results = self._messages[first : last + 1]
        if self._dialect.is_newer:
            results = results_in_call_order(self._messages[first - 1].tool_calls, results)
        self._out.special(OBSERVATION)
        for result in results:
            self._out.special("<tool_response>")
            self._out.text(result.content)
            self._out.special("</tool_response>")
