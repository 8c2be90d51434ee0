"""Log-probabilities in the shapes of the API, against plain decoding."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gnomon.engine.messages import TokenLogprobs
from gnomon.server.logprobs import (
    LEAST,
    CompletionLogprobsWriter,
    chat_logprobs,
    prompt_logprobs,
)
from gnomon.text.assets import default_tokenizer

TOKENIZER = default_tokenizer("deepseek_v32")


def scored(token_id: int, logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1, [(token_id, logprob), (7, float("-inf"))])


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(1, 4), max_size=30))
def test_offsets_count_the_characters_before(text: str, cuts: list[int]) -> None:
    ids = TOKENIZER.encode_plain(text)
    writer = CompletionLogprobsWriter(TOKENIZER)
    offsets: list[int] = []
    tokens: list[str] = []
    left = list(ids)
    for size in [*cuts, len(ids)]:
        part, left = left[:size], left[size:]
        written = writer.write(part, [scored(index) for index in part])
        offsets.extend(written.text_offset)
        tokens.extend(written.tokens)
    assert len(offsets) == len(ids)
    data = b""
    for index, offset in zip(ids, offsets, strict=True):
        whole = data.decode("utf-8", errors="ignore")  # an unfinished character is not counted
        assert offset == len(whole)
        data += TOKENIZER.token_bytes(index)


def test_infinity_becomes_a_number_of_json() -> None:
    scores = [scored(300), scored(301, float("-inf"))]
    for shape in (
        chat_logprobs(scores, TOKENIZER),
        prompt_logprobs([None, *scores], TOKENIZER),
        CompletionLogprobsWriter(TOKENIZER).write([300, 301], scores),
    ):
        text = msgspec.json.encode(shape).decode()
        assert str(LEAST) in text
        json.loads(text)
    assert chat_logprobs(scores, TOKENIZER).content[1].logprob == LEAST


def test_bytes_have_the_truth_about_half_a_character() -> None:
    ids = TOKENIZER.encode_plain("𒀀")
    assert len(ids) > 1
    entries = chat_logprobs([scored(index) for index in ids], TOKENIZER).content
    assert "\ufffd" in entries[0].token
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "𒀀"
