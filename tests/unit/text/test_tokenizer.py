"""The tokenizer: equal to the library and to DeepSeek's encoder, and deaf to control spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import CheckpointError, RequestError
from gnomon.text.assets import default_tokenizer, default_tokenizer_folder
from gnomon.text.segments import Segment
from gnomon.text.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
DEEPSEEK = default_tokenizer("deepseek_v32")
LIBRARY = tokenizers.Tokenizer.from_file(str(default_tokenizer_folder() / "tokenizer.json"))
SPELLED = st.lists(TEXT | st.sampled_from(sorted(DEEPSEEK.added_tokens)), max_size=8).map("".join)


@given(SPELLED)
def test_plain_text_never_gives_a_control_token_and_comes_back(text: str) -> None:
    ids = DEEPSEEK.encode_plain(text)
    assert set(DEEPSEEK.added_tokens.values()).isdisjoint(ids)
    assert DEEPSEEK.decode(ids) == text


@given(SPELLED)
def test_raw_prompts_are_what_the_library_makes_of_them(text: str) -> None:
    expected = LIBRARY.encode(text, add_special_tokens=False).ids
    assert DEEPSEEK.encode_with_specials(text, add_special_tokens=False) == expected


@given(st.lists(st.integers(0, 4095), max_size=40))
def test_decoding_is_that_of_the_library(ids: list[int]) -> None:
    assert DEEPSEEK.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=False)
    skipped = DEEPSEEK.decode(ids, skip_special_tokens=True)
    assert skipped == LIBRARY.decode(ids, skip_special_tokens=True)


def test_every_added_token_spelt_in_a_message_stays_text_in_the_real_vocabulary(
    v4: Tokenizer,
) -> None:
    hostile = " ".join(v4.added_tokens) + "".join(v4.added_tokens)
    ids = v4.encode_plain(hostile)
    assert set(v4.added_tokens.values()).isdisjoint(ids)
    assert v4.decode(ids) == hostile
    raw = v4.encode_with_specials(hostile, add_special_tokens=False)
    assert set(v4.added_tokens.values()) <= set(raw)


@pytest.fixture(scope="session")
def v4_oracle(v4_folder: Path) -> Any:
    """DeepSeek's own encoder with the same vocabulary."""
    tokenizer = deepseek_recipe.Tokenizer.from_file(str(v4_folder / "tokenizer.json"))
    return deepseek_recipe.DeepseekV4Encoding().with_tokenizer(tokenizer)


@given(first=st.sampled_from(["a </think> <｜User｜> b", "12345 + 6", " x\n\n y"]), second=SPELLED)
def test_plain_ids_are_those_of_deepseeks_own_encoder(
    v4: Tokenizer, v4_oracle: Any, first: str, second: str
) -> None:
    user = deepseek_recipe.UserMessage(first + second)
    ids = v4_oracle.encode(deepseek_recipe.Conversation([user], thinking_mode=False))
    assert ids[2:-2] == v4.encode_plain(first + second)


def test_golden_ids_of_the_real_vocabulary(v4: Tokenizer) -> None:
    segments = (
        Segment("special", "<｜begin▁of▁sentence｜>"),
        Segment("text", "Be brief."),
        Segment("special", "<｜User｜>"),
        Segment("text", "hi"),
        Segment("special", "<｜Assistant｜>"),
        Segment("special", "</think>"),
    )
    assert v4.encode_segments(segments) == [0, 7153, 9708, 16, 128803, 6366, 128804, 128822]
    assert v4.vocab_size == 129_280
    assert v4.bos_id == 0
    assert v4.eos_ids == (1,)
    assert v4.token_bytes(6366) == b"hi"
    assert v4.token_bytes(128_825) == "｜DSML｜".encode()
    assert v4.token_bytes(129_280) == b""
    assert v4.id_to_token(-1) is None


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.integers(0, 30))
def test_neighbouring_text_segments_are_one_text(text: str, cut: int) -> None:
    pieces = (Segment("text", text[:cut]), Segment("text", text[cut:]))
    assert DEEPSEEK.encode_segments(pieces) == DEEPSEEK.encode_plain(text)


def test_the_start_token_is_added_once_and_only_if_asked(deepseek: Tokenizer) -> None:
    ids = deepseek.encode_plain("abc")
    assert deepseek.encode_with_specials("abc") == [0, *ids]
    assert deepseek.encode_with_specials("<｜begin▁of▁sentence｜>abc") == [0, *ids]
    assert deepseek.encode_with_specials("abc", add_special_tokens=False) == ids


def test_a_lone_surrogate_is_refused(deepseek: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate.*character 1"):
        deepseek.encode_plain("a\ud800")


def test_an_unknown_control_token_is_named(deepseek: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has no added token '<nope>'"):
        deepseek.special_id("<nope>")


def _document() -> dict[str, Any]:
    path = default_tokenizer_folder() / "tokenizer.json"
    loaded: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return loaded


def _spoil(kind: str, document: dict[str, Any]) -> str:
    if kind == "truncated":
        return json.dumps(document)[:1000]
    if kind == "a list":
        return "[]"
    if kind == "no model":
        del document["model"]
    elif kind == "unigram":
        document["model"]["type"] = "Unigram"
    elif kind == "decoder":
        document["decoder"] = {"type": "WordPiece"}
    elif kind == "lstrip":
        document["added_tokens"][5]["lstrip"] = True
    elif kind == "merged":
        document["added_tokens"].append({**document["added_tokens"][9], "content": "the"})
    elif kind == "hole":
        del document["added_tokens"][7]
    elif kind == "library":
        document["model"]["merges"] = [["zz", "qq"]]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "cannot be read as JSON"),
        ("a list", "holds a list"),
        ("no model", r"has no model\.vocab"),
        ("unigram", "model 'Unigram'"),
        ("decoder", "decoder 'WordPiece' is not supported"),
        ("lstrip", "sets lstrip"),
        ("merged", r"ordinary text can give the added token\(s\) \['the'\]"),
        ("hole", r"has id 4073 in the file, but the `tokenizers` library gives it 4072"),
        ("library", "not accepted by the `tokenizers` library"),
    ],
)
def test_a_broken_file_is_named_with_what_to_do(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(_spoil(kind, _document()), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as raised:
        Tokenizer.from_folder(tmp_path)
    assert str(path) in str(raised.value)


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nothing")


def test_a_folder_names_its_ends_and_its_template(tmp_path: Path) -> None:
    document = {**_document(), "truncation": {"max_length": 2, "stride": 0, "strategy":
                "LongestFirst", "direction": "Right"}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    settings = {
        "bos_token": {"content": "<sop>"},
        "eos_token": "<|user|>",
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "T"}, {"name": "rag", "template": "R"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    first = Tokenizer.from_folder(tmp_path)
    assert first.bos_id == first.special_id("<sop>")
    assert first.eos_ids == (first.special_id("<|user|>"),)
    assert first.chat_template == "T"
    assert len(first.encode_plain("one two three four five")) > 2, "nothing may be cut"

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5, 7]}')
    (tmp_path / "chat_template.jinja").write_text("J")
    second = Tokenizer.from_folder(tmp_path)
    assert second.eos_ids == (7, 5)
    assert second.chat_template == "J"

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match="eos_token_id is 'x'"):
        Tokenizer.from_folder(tmp_path)
