"""The tokenizer that ships with gnomon, for models that bring none.

In:  a model type.
Out: the tokenizer, with the start and end tokens of that family, and GLM's chat template in our
     own words. One vocabulary serves both families: 4,096 entries with the real control tokens of
     both (tools/train_tokenizer.py made it).
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from gnomon.text.encodings import dsv32, glm
from gnomon.text.encodings.registry import GLM_MODELS
from gnomon.text.tokenizer import Tokenizer
from gnomon.text.tokenizer_files import read_tokenizer_file


def default_tokenizer_folder() -> Path:
    """The folder in the package that holds tokenizer.json."""
    return Path(str(files("gnomon") / "assets" / "tokenizer"))


def default_tokenizer(model_type: str) -> Tokenizer:
    """The default vocabulary with the start and end tokens of the model's family.

    For every type but GLM's these are DeepSeek's, which start each raw prompt with a token.
    """
    found = read_tokenizer_file(default_tokenizer_folder() / "tokenizer.json")
    if model_type in GLM_MODELS:
        template = (default_tokenizer_folder() / "glm_chat_template.jinja").read_text("utf-8")
        ends = tuple(found.added[token] for token in glm.STOP_TOKENS)
        return Tokenizer(replace(found, eos_ids=ends, chat_template=template))
    ends = (found.added[dsv32.EOS],)
    return Tokenizer(replace(found, bos=dsv32.BOS, adds_bos=True, eos_ids=ends))
