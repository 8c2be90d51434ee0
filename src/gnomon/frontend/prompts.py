"""The shapes in which a prompt may be given offline, and the ids that they mean.

In:  a text; token ids; {"prompt": text}; {"prompt_token_ids": ids}; or a list of these.
Out: Prompt values: the text, if there was one, and its ids.
A raw text is the model's own format: control tokens may be spelt out in it, and the start token is
added where the checkpoint says so. Chat messages go through an encoding (LLM.chat), never here.
Errors: RequestError with the shape that was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.errors import RequestError
from gnomon.text.tokenizer import Tokenizer

TOKEN_IDS_ONLY = "this engine has no tokenizer; give prompt_token_ids"


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is None where ids were given."""

    text: str | None
    token_ids: list[int]


def read_prompts(prompts: Any, tokenizer: Tokenizer | None) -> list[Prompt]:
    """One prompt, or a list of them, as a list. A flat list of integers is one prompt."""
    if isinstance(prompts, str | Mapping) or _are_ids(prompts):
        prompts = [prompts]
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts are {_shown(prompts)}; {SHAPES}", param="prompts")
    return [_read(prompt, tokenizer, place) for place, prompt in enumerate(prompts)]


SHAPES = (
    'allowed are a text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, '
    "or a list of these"
)


def _read(prompt: Any, tokenizer: Tokenizer | None, place: int) -> Prompt:
    param = f"prompts.{place}"
    if isinstance(prompt, Mapping):
        known = {"prompt", "prompt_token_ids"} & set(prompt)
        if len(prompt) != 1 or not known:
            raise RequestError(f"{param} has the keys {sorted(prompt)}; {SHAPES}", param=param)
        prompt = prompt[known.pop()]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(f"{param} is a text, but {TOKEN_IDS_ONLY}", param=param)
        return Prompt(prompt, tokenizer.encode_with_specials(prompt))
    if _are_ids(prompt) or (isinstance(prompt, list | tuple) and not prompt):
        return Prompt(None, list(prompt))
    raise RequestError(f"{param} is {_shown(prompt)}; {SHAPES}", param=param)


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."
