"""Chat messages and tools as a client sends them, checked and made plain for the encodings.

In:  the `messages` and `tools` of an OpenAI request, as decoded JSON.
Out: frozen `ChatMessage` and `Tool` values: a known role, content as one text, arguments as a
     mapping, every tool result behind the calls it may answer.
Errors: RequestError whose `param` names the place ("messages.2.content.0.type").
Accepted beyond OpenAI: `reasoning_content` or `reasoning`, and `prefix`, on assistant messages;
`tools` and `response_format` on system and developer messages (DeepSeek's own shape). A field
that is not known is refused unless it is null or empty, as clients that echo an answer send it.
Not here: how a role, a result or a tool is written (encodings/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from gnomon.errors import RequestError
from gnomon.text.json_values import check_text, check_value, parse_object

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)

_KNOWN_FIELDS: dict[str, frozenset[str]] = {
    "system": frozenset({"tools", "response_format"}),
    "developer": frozenset({"tools", "response_format"}),
    "user": frozenset(),
    "assistant": frozenset({"reasoning_content", "reasoning", "tool_calls", "prefix"}),
    "tool": frozenset({"tool_call_id"}),
}
_SHARED_FIELDS = frozenset({"role", "content", "name"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in an assistant message; `arguments` is the object that its JSON text holds."""

    call_id: str | None
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call. `definition` is the object as the client sent it."""

    name: str
    definition: Mapping[str, Any]

    @property
    def function(self) -> Mapping[str, Any]:
        """The inner object: name, description, parameters."""
        return cast(Mapping[str, Any], self.definition["function"])


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `param` is its place in the request, for errors found later.

    `reasoning` is None where the client sent none, which is not the empty thought.
    """

    role: Role
    content: str
    param: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    is_prefix: bool = False
    tools: tuple[Tool, ...] = ()
    response_format: Mapping[str, Any] | None = field(default=None)


def parse_messages(
    messages: Sequence[Mapping[str, Any]], *, part_separator: str
) -> tuple[ChatMessage, ...]:
    """Check a conversation. Parts of one message's content are joined by `part_separator`."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    parsed = tuple(
        _parse_message(message, f"messages.{place}", part_separator)
        for place, message in enumerate(messages)
    )
    for place, message in enumerate(parsed):
        if message.role == "tool":
            before = parsed[place - 1] if place else None
            if before is None or not (before.role == "tool" or before.tool_calls):
                raise RequestError(
                    f"{message.param} is a tool result that follows no assistant message with "
                    "tool_calls; send the call before its result",
                    param=message.param,
                )
        if message.is_prefix and place != len(parsed) - 1:
            raise RequestError(
                f"{message.param}.prefix is true, but only the last message can be continued",
                param=f"{message.param}.prefix",
            )
    return parsed


def parse_tools(
    tools: Sequence[Mapping[str, Any]] | None, param: str = "tools"
) -> tuple[Tool, ...]:
    """Check the tools of a request (or of a message, by `param`). None and [] mean none."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise RequestError(f"{param} must be a list of tools", param=param)
    return tuple(_parse_tool(tool, f"{param}.{place}") for place, tool in enumerate(tools))


def results_in_call_order(
    calls: Sequence[ToolCall], results: Sequence[ChatMessage]
) -> tuple[ChatMessage, ...]:
    """Results sorted into the order of the calls they answer.

    Only where it is certain: every call and every result has an id, ids differ, and both sides
    have the same ones. Otherwise the client's order stands.
    """
    by_id = {result.tool_call_id: result for result in results}
    ids = [call.call_id for call in calls]
    is_certain = (
        None not in ids
        and None not in by_id
        and len(by_id) == len(results)
        and len(set(ids)) == len(ids)
        and set(ids) == set(by_id)
    )
    return tuple(by_id[call_id] for call_id in ids) if is_certain else tuple(results)


def _parse_message(message: Any, param: str, part_separator: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{param} is a {type(message).__name__}; an object with role and content is expected",
            param=param,
        )
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{param}.role is {role!r}; allowed are {', '.join(ROLES)}", param=f"{param}.role"
        )
    _refuse_unknown_fields(message, cast(Role, role), param)
    calls = _parse_calls(message.get("tool_calls"), f"{param}.tool_calls")
    reasoning = _optional_text(message, "reasoning_content", param)
    if reasoning is None:
        reasoning = _optional_text(message, "reasoning", param)
    content = message.get("content")
    if content is None and not (calls or reasoning is not None):
        needed = "content or tool_calls" if role == "assistant" else "content"
        raise RequestError(f"{param} has no {needed}", param=f"{param}.content")
    is_prefix = message.get("prefix")
    if is_prefix not in (None, False, True):
        raise RequestError(f"{param}.prefix must be true or false", param=f"{param}.prefix")
    response_format = message.get("response_format")
    if response_format is not None:
        check_value(response_format, f"{param}.response_format")
    return ChatMessage(
        role=cast(Role, role),
        content=_parse_content(content, f"{param}.content", part_separator),
        param=param,
        name=_optional_text(message, "name", param),
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=_optional_text(message, "tool_call_id", param),
        is_prefix=bool(is_prefix),
        tools=parse_tools(message.get("tools"), f"{param}.tools"),
        response_format=response_format,
    )


def _refuse_unknown_fields(message: Mapping[str, Any], role: Role, param: str) -> None:
    known = _SHARED_FIELDS | _KNOWN_FIELDS[role]
    for name, value in message.items():
        if name in known or value is None or value in ("", [], {}):
            continue
        raise RequestError(
            f"{param}.{name} is not a field of a message of role {role}; "
            f"allowed are {', '.join(sorted(known))}",
            param=f"{param}.{name}",
        )


def _parse_content(content: Any, param: str, part_separator: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        check_text(content, param)
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{param} is a {type(content).__name__}; a text or a list of text parts is expected",
            param=param,
        )
    texts = []
    for place, part in enumerate(content):
        at = f"{param}.{place}"
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{at} is {kind!r}; only parts {{"type": "text", "text": ...}} are accepted, '
                "this model reads text",
                param=at,
            )
        check_text(part["text"], at)
        texts.append(part["text"])
    return part_separator.join(texts)


def _parse_calls(calls: Any, param: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{param} must be a list of tool calls", param=param)
    return tuple(_parse_call(call, f"{param}.{place}") for place, call in enumerate(calls))


def _parse_call(call: Any, param: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise RequestError(
            f'{param} must be {{"id": ..., "type": "function", "function": {{"name": ..., '
            '"arguments": ...}}',
            param=param,
        )
    at = f"{param}.function.arguments"
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = parse_object(arguments or "{}", at)
    elif isinstance(arguments, Mapping):
        check_value(arguments, at)
    else:
        raise RequestError(f"{at} must be the text of a JSON object", param=at)
    name = _name_of(function, f"{param}.function")
    return ToolCall(_optional_text(call, "id", param), name, arguments)


def _parse_tool(tool: Any, param: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(
            f'{param} must be {{"type": "function", "function": {{"name": ..., '
            '"parameters": {...}}}; no other kind of tool is known here',
            param=param,
        )
    check_value(tool, param)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        at = f"{param}.function.parameters"
        raise RequestError(f"{at} must be a JSON schema, an object", param=at)
    return Tool(_name_of(function, f"{param}.function"), tool)


def _name_of(function: Mapping[str, Any], param: str) -> str:
    name = _optional_text(function, "name", param)
    if not name:
        raise RequestError(f"{param}.name must be a text that is not empty", param=f"{param}.name")
    return name


def _optional_text(holder: Mapping[str, Any], key: str, param: str) -> str | None:
    value = holder.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise RequestError(
            f"{param}.{key} is a {type(value).__name__}; a text is expected", param=f"{param}.{key}"
        )
    check_text(value, f"{param}.{key}")
    return value
