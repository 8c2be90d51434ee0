"""The fixed words of DeepSeek-V3.2's chat format: tools, calls and the response format in DSML.

In:  tools, tool calls, a response format, and where to write text, control tokens and the DSML
     mark (three functions of one text each).
Out: the parts of the prompt, in the wording of the checkpoint's own encoder; a model answers in
     this format because these very words were in its training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gnomon.errors import RequestError
from gnomon.text.encodings.base import THINK_END, THINK_START
from gnomon.text.json_values import to_json
from gnomon.text.messages import Tool, ToolCall

DSML: Final = "｜DSML｜"

Write = Callable[[str], None]

_TOOLS_BEFORE: Final = f"""\
## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of \
your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists \
and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:
<{DSML}function_calls>
...
</{DSML}function_calls>
<function_results>
...
</function_results>
{THINK_START}...thinking about results{THINK_END}
Here are the functions available in JSONSchema format:
<functions>
"""
_TOOLS_AFTER: Final = "\n</functions>\n"

_SCHEMA_BEFORE: Final = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)
_ANY_JSON: Final = (
    "\n\nYou are a helpful assistant designed to output JSON.\n"
    "## Response Format:\n\nReply with JSON object ONLY."
)

_CONTROL: Final = re.compile(f"({DSML}|{THINK_START}|{THINK_END})")


def write_tools(
    tools: Sequence[Tool], write_text: Write, write_special: Write, write_dsml: Write
) -> None:
    """The section that describes the tools, one JSON object a line."""
    for piece in _CONTROL.split(_TOOLS_BEFORE):
        if piece == DSML:
            write_dsml(piece)
        elif piece in (THINK_START, THINK_END):
            write_special(piece)
        else:
            write_text(piece)
    write_text("\n".join(to_json(tool.function) for tool in tools))
    write_text(_TOOLS_AFTER)


def write_calls(calls: Sequence[ToolCall], write_text: Write, write_dsml: Write) -> None:
    """The block of an assistant's calls. Texts stand as they are, other values as JSON."""
    write_text("\n\n<")
    write_dsml(DSML)
    write_text("function_calls>\n")
    for call in calls:
        write_text("<")
        write_dsml(DSML)
        write_text(f'invoke name="{call.name}">\n')
        for place, (key, value) in enumerate(call.arguments.items()):
            is_text = isinstance(value, str)
            write_text("\n<" if place else "<")
            write_dsml(DSML)
            write_text(f'parameter name="{key}" string="{"true" if is_text else "false"}">')
            write_text(value if is_text else to_json(value))
            write_text("</")
            write_dsml(DSML)
            write_text("parameter>")
        write_text("\n</")
        write_dsml(DSML)
        write_text("invoke>\n")
    write_text("</")
    write_dsml(DSML)
    write_text("function_calls>")


def response_format_text(response_format: Mapping[str, Any], param: str) -> str:
    """The words that ask for a format: none for text, the schema for a JSON schema."""
    kind = response_format.get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return _ANY_JSON
    holder = response_format.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise RequestError(
            f"response_format ({param}) has type {kind!r}; allowed are text, json_object, and "
            "json_schema with json_schema.schema, an object",
            param="response_format",
        )
    return _SCHEMA_BEFORE + to_json(schema)
