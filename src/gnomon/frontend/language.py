"""Find the language of a configured model before the engine starts.

In:  EngineConfig (model, tokenizer).
Out: Language (tokenizer, chat encoding, end tokens), or None with `tokenizer="none"`, which serves
     token ids only. Reads config.json's `model_type` and the tokenizer's files, no weights.
A fault of the model folder itself is left to the engine, whose message says more.
"""

from __future__ import annotations

import json
from pathlib import Path

from gnomon.engine.config import EngineConfig
from gnomon.errors import CheckpointError
from gnomon.models.built_in import folder_of
from gnomon.text.language import Language, open_language

NO_TOKENIZER = "none"
RANDOM_PREFIX = "random:"
DEFAULT_TYPE = "deepseek_v32"


def language_of(config: EngineConfig) -> Language | None:
    """The language of a model; CheckpointError if its tokenizer is missing or broken."""
    if config.tokenizer == NO_TOKENIZER:
        return None
    model_type, folder = _model_type(config.model)
    if config.tokenizer is not None:
        folder = Path(config.tokenizer).expanduser()
    try:
        return open_language(model_type, folder)
    except CheckpointError as error:
        if folder is not None and not folder.is_dir():
            return None  # the engine names the folder that is not there
        raise CheckpointError(
            f"{error} Another folder's tokenizer: --tokenizer FOLDER; token ids only: "
            f"--tokenizer {NO_TOKENIZER}."
        ) from error


def _model_type(model: str | None) -> tuple[str, Path | None]:
    """(model_type, folder); the default type where the folder does not say."""
    if model is not None and model.startswith(RANDOM_PREFIX):
        return model.removeprefix(RANDOM_PREFIX).split(",")[0], None
    folder = folder_of(model)
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return DEFAULT_TYPE, folder
    kind = found.get("model_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else DEFAULT_TYPE, folder
