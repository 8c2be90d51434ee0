"""Text with a weight on every piece, and the two families' chat formats around it.

In:  pieces of text and control tokens, each with the weight of its tokens in the loss.
Out: token ids (uint16) and weights (float16) of an episode.
A control token gets in by name only. Text between two control tokens is encoded as one, as gnomon
does; a token of two pieces has the weight of the piece that its last character is in.
The formats are those of `gnomon.text.encodings`; tests compare them id by id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from tokenizers import Tokenizer

TOKENIZER = Path(__file__).parents[2] / "src/gnomon/assets/tokenizer/tokenizer.json"

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
GLM_START = ("[gMASK]", "<sop>")
GLM_SYSTEM, GLM_USER, GLM_ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
GLM_OBSERVATION = "<|observation|>"

Piece = tuple[str, float]
Pieces = Sequence[Piece]
Call = tuple[str, Mapping[str, Any]]
Family = Literal["dsv32", "glm"]


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """The vocabulary that the models are shipped with."""
    return Tokenizer.from_file(str(TOKENIZER))


@lru_cache(maxsize=4096)
def _cached(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


class Episode:
    """One text in the making."""

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []
        self._open: list[Piece] = []
        self.num_characters = 0

    def say(self, text: str, weight: float) -> None:
        """Ordinary text."""
        if text:
            self._open.append((text, weight))
            self.num_characters += len(text)

    def say_all(self, pieces: Iterable[Piece]) -> None:
        """Several pieces of one text."""
        for text, weight in pieces:
            self.say(text, weight)

    def mark(self, name: str, weight: float = 0.0) -> None:
        """A control token."""
        self._flush()
        self._ids.append(np.array([tokenizer().token_to_id(name)], np.uint16))
        self._weights.append(np.array([weight], np.float16))

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights so far."""
        self._flush()
        return np.concatenate(self._ids), np.concatenate(self._weights)

    def _flush(self) -> None:
        pieces, self._open = self._open, []
        if not pieces:
            return
        if len({weight for _, weight in pieces}) == 1 and len(pieces) < 4:
            ids = _cached("".join(text for text, _ in pieces))
            self._ids.append(np.array(ids, np.uint16))
            self._weights.append(np.full(len(ids), pieces[0][1], np.float16))
            return
        found = tokenizer().encode("".join(text for text, _ in pieces), add_special_tokens=False)
        ends = np.cumsum([len(text) for text, _ in pieces])
        last = np.array([end for _, end in found.offsets]) - 1
        place = np.searchsorted(ends, last, side="right")
        self._ids.append(np.array(found.ids, np.uint16))
        self._weights.append(np.array([weight for _, weight in pieces], np.float16)[place])


class Chat(Protocol):
    """A conversation in one family's format. Answers count in the loss, questions do not."""

    episode: Episode

    def user(self, pieces: Pieces) -> None:
        """A question, up to the point where the model takes over."""

    def answer(self, text: str, thoughts: str | None = None, calls: Sequence[Call] = ()) -> None:
        """What the model shall write, its end token included."""

    def results(self, results: Sequence[str]) -> None:
        """The results of the calls just made, up to the point where the model takes over."""


def chat(family: Family, system: str = "", tools: Sequence[Mapping[str, Any]] = ()) -> Chat:
    """A conversation that has begun: `tools` are function objects in OpenAI's shape."""
    return DeepSeekChat(system, tools) if family == "dsv32" else GlmChat(system, tools)


class DeepSeekChat:
    """DeepSeek-V3.2's format."""

    def __init__(self, system: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self.episode = Episode()
        self.episode.mark(BOS)
        self.episode.say(system, 0.0)
        if tools:
            before, after = _dsml_tools_text()
            self._write("\n\n" + before, 0.0)
            lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
            self._write("\n".join(lines) + after, 0.0)

    def user(self, pieces: Pieces) -> None:
        self.episode.mark(USER)
        self.episode.say_all(pieces)
        self.episode.mark(ASSISTANT)

    def answer(self, text: str, thoughts: str | None = None, calls: Sequence[Call] = ()) -> None:
        episode = self.episode
        if thoughts is not None:
            episode.mark(THINK)
            episode.say(thoughts, 1.0)
        episode.mark(END_THINK, 0.0 if thoughts is None else 1.0)
        episode.say(text, 1.0)
        if calls:
            self._write(dsml_calls(calls), 1.0)
        episode.mark(EOS, 1.0)

    def results(self, results: Sequence[str]) -> None:
        lines = "".join(f"\n<result>{result}</result>" for result in results)
        self.episode.say(f"\n\n<function_results>{lines}\n</function_results>\n\n", 0.0)

    def _write(self, text: str, weight: float) -> None:
        """Text in which the DSML mark and the thinking tags are control tokens."""
        for piece in _split_marks(text):
            if piece in (DSML, THINK, END_THINK):
                self.episode.mark(piece, weight)
            else:
                self.episode.say(piece, weight)


def dsml_calls(calls: Sequence[Call]) -> str:
    """The block of calls as one reads it."""
    block = f"\n\n<{DSML}function_calls>\n"
    for name, arguments in calls:
        lines = []
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value)
            kind = "true" if is_text else "false"
            lines.append(f'<{DSML}parameter name="{key}" string="{kind}">{shown}</{DSML}parameter>')
        block += f'<{DSML}invoke name="{name}">\n' + "\n".join(lines) + f"\n</{DSML}invoke>\n"
    return block + f"</{DSML}function_calls>"


def _split_marks(text: str) -> list[str]:
    """Text cut before and after each mark."""
    for name in (DSML, THINK, END_THINK):
        text = text.replace(name, f"\0{name}\0")
    return [piece for piece in text.split("\0") if piece]


def _dsml_tools_text() -> tuple[str, str]:
    """The words around the tools, as in the checkpoint's own encoder."""
    text = (Path(__file__).parent / "dsml_tools.txt").read_text(encoding="utf-8")
    before, _, after = text.partition("{tools}")
    return before, after


class GlmChat:
    """GLM-5's format. A turn ends with the role token that comes next, which the model writes."""

    def __init__(self, system: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self.episode = Episode()
        self._next = 0.0  # weight of the next role token
        for name in GLM_START:
            self.episode.mark(name)
        if tools:
            self.episode.mark(GLM_SYSTEM)
            text = (Path(__file__).parent / "glm_tools.txt").read_text(encoding="utf-8")
            lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
            for piece in _split_tags(text.replace("{tools}\n", lines)):
                self._tag_or_text(piece, 0.0)
        if system:
            self.episode.mark(GLM_SYSTEM)
            self.episode.say(system, 0.0)

    def user(self, pieces: Pieces) -> None:
        if not self._next:  # else the model has written it
            self.episode.mark(GLM_USER)
        self.episode.say_all(pieces)
        self.episode.mark(GLM_ASSISTANT)

    def answer(self, text: str, thoughts: str | None = None, calls: Sequence[Call] = ()) -> None:
        episode = self.episode
        if thoughts is not None:
            episode.mark(THINK)
            episode.say(thoughts, 1.0)
        episode.mark(END_THINK, 0.0 if thoughts is None else 1.0)
        episode.say(text, 1.0)
        for piece in _split_tags("".join(glm_call(*call) for call in calls)):
            self._tag_or_text(piece, 1.0)
        self._next = 1.0
        episode.mark(GLM_OBSERVATION if calls else GLM_USER, 1.0)

    def results(self, results: Sequence[str]) -> None:
        for result in results:
            self.episode.mark("<tool_response>")
            self.episode.say(result, 0.0)
            self.episode.mark("</tool_response>")
        self.episode.mark(GLM_ASSISTANT)

    def _tag_or_text(self, piece: str, weight: float) -> None:
        if piece in GLM_TAGS:
            self.episode.mark(piece, weight)
        else:
            self.episode.say(piece, weight)


GLM_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def glm_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as one reads it."""
    parts = [
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{''.join(parts)}</tool_call>"


def _split_tags(text: str) -> list[str]:
    for name in GLM_TAGS:
        text = text.replace(name, f"\0{name}\0")
    return [piece for piece in text.split("\0") if piece]
