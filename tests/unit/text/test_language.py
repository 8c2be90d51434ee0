"""One decision, made once: which tokenizer, which chat encoding, which ends, and why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gnomon.errors import CheckpointError, UnsupportedError
from gnomon.text.assets import default_tokenizer_folder
from gnomon.text.language import open_language

HELLO = [{"role": "user", "content": "hi"}]


def folder_with(tmp_path: Path, **files: str) -> Path:
    shutil.copy(default_tokenizer_folder() / "tokenizer.json", tmp_path)
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("model_type", "name", "reason", "text"),
    [
        (
            "deepseek_v32",
            "dsv32",
            "DSML",
            "<｜User｜>hi<｜Assistant｜></think>",
        ),
        ("glm_moe_dsa", "jinja", "sandbox", "<|user|>hi<|assistant|><think>"),
    ],
)
def test_models_without_files(model_type: str, name: str, reason: str, text: str) -> None:
    language = open_language(model_type)
    assert language.chat.name == name
    assert reason in language.reason
    assert language.chat.render(HELLO).text.endswith(text)
    assert language.stop_ids == language.tokenizer.eos_ids == language.chat.stop_ids


def test_folders(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, generation_config__json='{"eos_token_id": 7}')
    plain = open_language("glm_moe_dsa", folder, glm_version="5.2")
    assert plain.chat.name == "glm-5.2"
    assert plain.stop_ids == (7, *plain.chat.stop_ids), "what the checkpoint says and the format"
    assert open_language("deepseek_v32", folder).chat.name == "dsv32"

    folder_with(tmp_path, chat_template__jinja="<|user|>{{ messages[0].content }}")
    for model_type in ("deepseek_v32", "glm_moe_dsa", "something_else"):
        language = open_language(model_type, folder)
        assert language.chat.name == "jinja"
        assert language.chat.render(HELLO).text == "<|user|>hi"
    given = open_language("glm_moe_dsa", folder, chat_template="<sop>{{ messages[0].content }}")
    assert given.chat.render(HELLO).text == "<sop>hi"


def test_a_model_that_cannot_chat_says_what_to_do(tmp_path: Path) -> None:
    language = open_language("something_else", folder_with(tmp_path))
    assert language.encoding is None
    with pytest.raises(UnsupportedError, match=r"chat_template\.jinja"):
        _ = language.chat


@pytest.mark.parametrize(
    ("model_type", "token"), [("deepseek_v32", "<｜User｜>"), ("glm_moe_dsa", "<arg_key>")]
)
def test_a_vocabulary_without_the_control_tokens_is_named(
    tmp_path: Path, model_type: str, token: str
) -> None:
    text = (default_tokenizer_folder() / "tokenizer.json").read_text("utf-8")
    (tmp_path / "tokenizer.json").write_text(text.replace(token, "<|other|>"), "utf-8")
    with pytest.raises(CheckpointError, match=f"no added token '{token}'"):
        open_language(model_type, tmp_path)
