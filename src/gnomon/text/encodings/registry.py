"""Which chat encoding a model speaks: decided once, here, for server, CLI and offline use alike.

In:  the model type of config.json, its tokenizer, its chat template if the folder has one.
Out: `EncodingChoice`: the encoding and, in words, why it was chosen (`gnomon explain` prints it).
Rules: a chat template in the folder is the checkpoint's own word and wins. Without one,
deepseek_v32 (and deepseek_v3) is written in DSML and glm_moe_dsa by our own GLM writer. Any other
model without a template can complete raw prompts, but not chat.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import UnsupportedError
from gnomon.text.encodings.base import ChatEncoding
from gnomon.text.encodings.dsv32 import Dsv32Encoding
from gnomon.text.encodings.glm import STOP_TOKENS, GlmEncoding
from gnomon.text.encodings.template import TemplateEncoding
from gnomon.text.tokenizer import Tokenizer

DSML_MODELS = ("deepseek_v32", "deepseek_v3")
GLM_MODELS = ("glm_moe_dsa",)


@dataclass(frozen=True, slots=True)
class EncodingChoice:
    """An encoding and the reason for it."""

    encoding: ChatEncoding
    reason: str


def choose_encoding(
    model_type: str,
    tokenizer: Tokenizer,
    chat_template: str | None,
    *,
    glm_version: str = "5",
) -> EncodingChoice:
    """The chat encoding of a model. `glm_version` matters only for GLM without a template.

    UnsupportedError if nothing here can write a chat for it; CheckpointError if the tokenizer
    lacks a token that the encoding needs, or the template is broken.
    """
    if chat_template is not None:
        stops = STOP_TOKENS if model_type in GLM_MODELS else ()
        return EncodingChoice(
            TemplateEncoding(tokenizer, chat_template, stop_tokens=stops),
            "the chat template that came with the tokenizer, run in a sandbox",
        )
    if model_type in DSML_MODELS:
        return EncodingChoice(
            Dsv32Encoding(tokenizer),
            f"{model_type} has no chat template: DeepSeek-V3.2's DSML format",
        )
    if model_type in GLM_MODELS:
        return EncodingChoice(
            GlmEncoding(tokenizer, glm_version),
            f"{model_type} folder without a chat template: the GLM-{glm_version} format",
        )
    known = ", ".join((*DSML_MODELS, *GLM_MODELS))
    raise UnsupportedError(
        f"model type {model_type!r} has no chat template and no chat encoding here (known: "
        f"{known}); put its chat_template.jinja into the model folder, or send raw prompts to "
        "/v1/completions"
    )
