"""DeepSeek-V3.2's chat format: DSML, written without a template.

In:  messages, tools, options.   Out: segments.
The format is that of `encoding_dsv32.py` in the V3.2 checkpoint; its words are what the model was
trained on, so they are data here. The rules:
- The start token, then system text with no role token. A user turn is <｜User｜>text<｜Assistant｜>
  and a thinking tag: <think> for the last user turn when thinking is on, else </think>.
- Thinking is off unless asked for; V3.2 has one level of it, so every effort but "none" means on.
- Thoughts before the last user turn are never written; asking to keep them is refused.
- Tools and the response format stand behind the text of the first system message (an empty one is
  made if the conversation does not begin with one), or in the system or developer message that
  carries them itself. A developer message is a user turn that names the user's message.
- Results of tool calls follow the assistant's end token with no role token, one for each call, in
  call order, and end with a thinking tag.
Where the reference gives up we follow DeepSeek-V4's encoder: a conversation that ends with a
system or an assistant message opens an assistant turn, and an assistant message without thoughts
after the last user turn gets </think> instead of an error. A continued message that has thoughts
turns thinking on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gnomon.errors import RequestError
from gnomon.text.encodings.base import (
    THINK_END,
    THINK_START,
    ChatOptions,
    Messages,
    Tools,
    continues_last,
)
from gnomon.text.encodings.dsv32_text import DSML, response_format_text, write_calls, write_tools
from gnomon.text.messages import (
    ChatMessage,
    Tool,
    parse_messages,
    parse_tools,
    results_in_call_order,
)
from gnomon.text.parsing.base import OutputParser, PlainParser
from gnomon.text.segments import PromptBuilder, RenderedPrompt
from gnomon.text.tokenizer import Tokenizer

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"


class Dsv32Encoding:
    """The chat encoding of DeepSeek-V3.2 for one tokenizer."""

    name = "dsv32"

    def __init__(self, tokenizer: Tokenizer) -> None:
        for token in (BOS, USER, ASSISTANT, THINK_START, THINK_END):
            tokenizer.special_id(token)
        self.stop_ids = (tokenizer.special_id(EOS),)
        # Without an id of its own (V3's vocabulary) the mark is ordinary text, as it would be for
        # anybody who encodes the rendered prompt with such a vocabulary.
        self._has_dsml = DSML in tokenizer.added_tokens

    def render(
        self, messages: Messages, *, tools: Tools | None = None, options: ChatOptions | None = None
    ) -> RenderedPrompt:
        """The prompt of a conversation; see the module for the rules."""
        options = options or ChatOptions()
        _refuse_foreign_options(options)
        parsed = parse_messages(messages, part_separator="\n\n")
        turns = _attach(parsed, parse_tools(tools), options.response_format)
        return _Writer(turns, options, self._has_dsml).write()

    def parser(self, *, starts_in_reasoning: bool, tools: Sequence[Tool] = ()) -> OutputParser:
        """A parser that calls everything content."""
        return PlainParser()


class _Writer:
    """Writes one conversation, message by message."""

    def __init__(
        self, messages: tuple[ChatMessage, ...], options: ChatOptions, has_dsml: bool
    ) -> None:
        self._messages = messages
        self._adds_generation = options.add_generation_prompt
        self._is_open = continues_last(messages, options)
        continues_thoughts = self._is_open and messages[-1].reasoning is not None
        self._wants_thinking = options.wants_thinking(default=False)
        self._is_thinking = continues_thoughts or self._wants_thinking
        self._last_user = max(
            (i for i, m in enumerate(messages) if m.role in ("user", "developer")), default=-1
        )
        self._out = PromptBuilder()
        self._write_dsml = self._out.special if has_dsml else self._out.text
        self._in_reasoning = False

    def write(self) -> RenderedPrompt:
        self._out.special(BOS)
        place = 0
        while place < len(self._messages):
            message = self._messages[place]
            if message.role == "system":
                self._system(message)
            elif message.role == "assistant":
                self._assistant(place, message)
            elif message.role == "tool":
                place = self._results(place)
            else:
                self._user(place, message)
            place += 1
        if self._messages[-1].role in ("system", "assistant") and self._adds_generation:
            self._open_turn_at_end()
        return self._out.build(starts_in_reasoning=self._in_reasoning)

    def _system(self, message: ChatMessage) -> None:
        self._out.text(message.content)
        self._extras(message)

    def _extras(self, message: ChatMessage) -> None:
        if message.tools:
            self._out.text("\n\n")
            write_tools(message.tools, self._out.text, self._out.special, self._write_dsml)
        if message.response_format is not None:
            self._out.text(response_format_text(message.response_format, message.param))

    def _user(self, place: int, message: ChatMessage) -> None:
        self._out.special(USER)
        if message.role == "developer":
            self._extras(message)
            self._out.text(f"\n\n# The user's message is: {message.content}")
        else:
            self._out.text(message.content)
        if place + 1 < len(self._messages) or self._adds_generation:
            self._out.special(ASSISTANT)
            self._think_tag(place)

    def _think_tag(self, place: int) -> None:
        """The tag behind the message at `place`: what an answer to it begins with."""
        self._in_reasoning = (
            self._is_thinking and place >= self._last_user and not self._is_thoughtless(place + 1)
        )
        self._out.special(THINK_START if self._in_reasoning else THINK_END)

    def _is_thoughtless(self, place: int) -> bool:
        """Whether an answer stands there that begins with neither thoughts nor calls.

        An empty answer that is to be continued has not begun: it is like none.
        """
        if place >= len(self._messages) or self._messages[place].role != "assistant":
            return False
        answer = self._messages[place]
        has_begun = bool(answer.content) or not self._is_open_at(place)
        return answer.reasoning is None and not answer.tool_calls and has_begun

    def _is_open_at(self, place: int) -> bool:
        return self._is_open and place == len(self._messages) - 1

    def _assistant(self, place: int, message: ChatMessage) -> None:
        is_open = self._is_open_at(place)
        has_thoughts = message.reasoning is not None or bool(message.tool_calls)
        if self._in_reasoning or (self._is_thinking and has_thoughts and place > self._last_user):
            self._out.text(message.reasoning or "")
            # With thinking off, thoughts that are handed over are complete.
            if not (is_open and not message.content and self._wants_thinking):
                self._out.special(THINK_END)
                self._in_reasoning = False
        self._out.text(message.content)
        if message.tool_calls:
            write_calls(message.tool_calls, self._out.text, self._write_dsml)
        if not is_open:
            self._out.special(EOS)

    def _results(self, first: int) -> int:
        """Write the results that begin at `first`; the place of the last one."""
        last = first
        while last + 1 < len(self._messages) and self._messages[last + 1].role == "tool":
            last += 1
        calls = self._messages[first - 1].tool_calls
        results = self._messages[first : last + 1]
        if len(results) != len(calls):
            raise RequestError(
                f"{self._messages[first - 1].param} makes {len(calls)} tool calls, but "
                f"{len(results)} results follow; send one result for each call",
                param=results[-1].param,
            )
        self._out.text("\n\n<function_results>")
        for result in results_in_call_order(calls, results):
            self._out.text(f"\n<result>{result.content}</result>")
        self._out.text("\n</function_results>")
        if last + 1 < len(self._messages) or self._adds_generation:
            self._out.text("\n\n")
            self._think_tag(last)
        return last

    def _open_turn_at_end(self) -> None:
        if not self._is_open:
            self._out.special(ASSISTANT)
            self._in_reasoning = self._is_thinking
            self._out.special(THINK_START if self._is_thinking else THINK_END)


def _attach(
    messages: tuple[ChatMessage, ...],
    tools: tuple[Tool, ...],
    response_format: Mapping[str, Any] | None,
) -> tuple[ChatMessage, ...]:
    """Put the request's own tools and response format on the first system message."""
    if not tools and response_format is None:
        return messages
    if messages[0].role != "system":
        messages = (ChatMessage("system", "", "messages"), *messages)
    first = messages[0]
    if (tools and first.tools) or (response_format and first.response_format):
        raise RequestError(
            f"{first.param} carries tools or a response_format, and so does the request; "
            "send them in one place",
            param="tools" if tools and first.tools else "response_format",
        )
    first = replace(
        first,
        tools=tools or first.tools,
        response_format=response_format or first.response_format,
    )
    return (first, *messages[1:])


def _refuse_foreign_options(options: ChatOptions) -> None:
    if options.keep_thoughts:
        raise RequestError(
            "DeepSeek-V3.2's chat format never keeps thoughts before the last user turn; leave "
            "out keep_thoughts (clear_thinking, drop_thinking)",
            param="chat_template_kwargs",
        )
    if options.template_kwargs:
        name = next(iter(options.template_kwargs))
        raise RequestError(
            f"chat_template_kwargs.{name} is not known to DeepSeek-V3.2's chat format; allowed "
            "are thinking, enable_thinking and reasoning_effort",
            param=f"chat_template_kwargs.{name}",
        )
