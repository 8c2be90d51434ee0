"""Law: streamed text is whole text, at every split; nothing certain is held back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.text.assets import default_tokenizer
from gnomon.text.detokenize import Detokenizer
from gnomon.text.tokenizer import Tokenizer

TOKENIZER = default_tokenizer("deepseek_v32")
ANY_IDS = st.lists(st.integers(0, 4200), max_size=40)
# U+FFFD itself is a character like others; here it is the sign of a broken one.
WIDE_CHARACTERS = st.characters(
    min_codepoint=0x80, exclude_categories=["Cs"], exclude_characters="\ufffd"
)
WIDE = st.text(WIDE_CHARACTERS, max_size=20)
TEXT_IDS = WIDE.map(TOKENIZER.encode_plain)


@given(ANY_IDS | TEXT_IDS, st.lists(st.integers(0, 40), max_size=8), st.booleans())
def test_portions_add_up_to_the_whole(ids: list[int], cuts: list[int], skips: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skips)
    edges = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    portions = [ids[a:b] for a, b in pairwise(edges)]
    streamed = "".join(detokenizer.feed(portion) for portion in portions) + detokenizer.finish()
    assert streamed == TOKENIZER.decode(ids, skip_special_tokens=skips)


@given(TEXT_IDS)
def test_a_character_that_can_still_be_completed_is_never_shown_broken(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for index in ids:
        assert "\ufffd" not in detokenizer.feed([index])
    assert detokenizer.finish() == ""


def test_bytes_of_one_character_over_several_calls(deepseek: Tokenizer) -> None:
    by_byte = {deepseek.token_bytes(index): index for index in range(3, 259)}
    ids = [by_byte[bytes([byte])] for byte in "🦊é".encode()]
    detokenizer = Detokenizer(deepseek)
    assert [detokenizer.feed([index]) for index in ids] == ["", "", "", "🦊", "", "é"]
    unfinished = Detokenizer(deepseek)
    assert unfinished.feed(ids[:3]) == ""
    assert unfinished.finish() == "\ufffd"
    broken = Detokenizer(deepseek)
    assert broken.feed([*ids[:3], by_byte[b"x"]]) == "\ufffdx"
    assert broken.finish() == ""


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_are_skipped_only_if_asked(glm: Tokenizer, skips: bool) -> None:
    ids = [*glm.encode_plain("a"), glm.special_id("<|user|>"), glm.special_id("<think>")]
    text = Detokenizer(glm, skip_special_tokens=skips).feed(ids)
    assert text == ("a<think>" if skips else "a<|user|><think>")
