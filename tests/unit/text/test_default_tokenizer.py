"""The vocabulary that ships: its size, its control tokens, its digits, its bytes."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from gnomon.text.assets import default_tokenizer, default_tokenizer_folder
from gnomon.text.tokenizer import Tokenizer
from tools.train_tokenizer import FIRST_TOKENS, FLAGGED_TOKENS, OTHER_TOKENS, VOCAB_SIZE

TOKENIZER = default_tokenizer("deepseek_v32")


def test_size_and_ids(deepseek: Tokenizer) -> None:
    assert deepseek.vocab_size == VOCAB_SIZE == 4096
    assert [deepseek.id_to_token(index) for index in range(3)] == list(FIRST_TOKENS)
    names = {*FIRST_TOKENS, *FLAGGED_TOKENS, *OTHER_TOKENS}
    assert set(deepseek.added_tokens) == names
    assert deepseek.skipped_ids == {
        deepseek.special_id(name) for name in (*FIRST_TOKENS, *FLAGGED_TOKENS)
    }
    assert all(deepseek.id_to_token(index) for index in range(4096)), "no unused id"
    assert (default_tokenizer_folder() / "tokenizer.json").stat().st_size < 160_000


def test_families_differ_in_their_ends_alone(deepseek: Tokenizer, glm: Tokenizer) -> None:
    assert deepseek.bos_id == 0
    assert deepseek.eos_ids == (1,)
    assert deepseek.chat_template is None
    assert glm.bos_id is None
    ends = ("<|endoftext|>", "<|user|>", "<|observation|>")
    assert glm.eos_ids == tuple(glm.special_id(name) for name in ends)
    assert glm.encode_plain("the same words") == deepseek.encode_plain("the same words")


def test_every_byte_has_a_token(deepseek: Tokenizer) -> None:
    single = {deepseek.token_bytes(index) for index in range(3, 259)}
    assert single == {bytes([value]) for value in range(256)}


@given(st.from_regex(r"[0-9]{1,12}", fullmatch=True))
def test_digits_stand_alone(number: str) -> None:
    ids = TOKENIZER.encode_plain(f"a{number}+{number}")
    pieces = [TOKENIZER.token_bytes(index) for index in ids]
    assert pieces == [b"a", *(d.encode() for d in number), b"+", *(d.encode() for d in number)]


def test_no_module_of_text_loads_torch_or_a_hub_library() -> None:
    program = (
        "import sys, gnomon.text.language, gnomon.text.stops, gnomon.text.detokenize\n"
        "gnomon.text.language.open_language('glm_moe_dsa')\n"
        "loaded = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
