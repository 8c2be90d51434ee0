"""All that gnomon needs to speak with one model: resolved once, at start.

In:  the model type of config.json and the model folder, or None for a model without files.
Out: `Language`: its tokenizer, its chat encoding, the tokens that end an answer, and why these.
Not here: reading config.json (models), flags (cli).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import UnsupportedError
from gnomon.text.assets import default_tokenizer
from gnomon.text.encodings.base import ChatEncoding
from gnomon.text.encodings.registry import choose_encoding
from gnomon.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Language:
    """What turns conversations into token ids for one model, and knows where its answers end.

    `stop_ids` are the ends that the checkpoint names and those of the chat format, in this order.
    `reason` says in words what was chosen and why. `chat` raises where there is no encoding.
    """

    tokenizer: Tokenizer
    encoding: ChatEncoding | None
    stop_ids: tuple[int, ...]
    reason: str

    @property
    def chat(self) -> ChatEncoding:
        """The chat encoding; UnsupportedError says what to do where there is none."""
        if self.encoding is None:
            raise UnsupportedError(self.reason)
        return self.encoding


def open_language(
    model_type: str,
    folder: Path | None = None,
    *,
    chat_template: str | None = None,
    glm_version: str = "5",
) -> Language:
    """Read the tokenizer of a model and choose its chat encoding.

    A folder must hold tokenizer.json; without a folder it is the default tokenizer. A
    `chat_template` given here (--chat-template) replaces the folder's own.
    """
    if folder is None:
        tokenizer = default_tokenizer(model_type)
        source = "default tokenizer of gnomon"
    else:
        tokenizer = Tokenizer.from_folder(folder)
        source = f"tokenizer of {folder}"
    template = tokenizer.chat_template if chat_template is None else chat_template
    encoding: ChatEncoding | None = None
    ends: tuple[int, ...] = ()
    try:
        choice = choose_encoding(model_type, tokenizer, template, glm_version=glm_version)
    except UnsupportedError as lack:
        reason = f"{source}; no chat: {lack}"
    else:
        encoding = choice.encoding
        ends = encoding.stop_ids
        reason = f"{source}; chat encoding {encoding.name}: {choice.reason}"
    return Language(tokenizer, encoding, tuple(dict.fromkeys((*tokenizer.eos_ids, *ends))), reason)
