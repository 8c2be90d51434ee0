"""/v1/completions through the official openai client, with a real engine behind it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

PROMPT = "The shadow of the pin falls"


def ask(client: openai.OpenAI, **more: Any) -> Any:
    fields = {"model": "sundial", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
    return client.completions.create(**fields)


def ids_of(client: openai.OpenAI, text: str) -> list[int]:
    body = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
    raw = client.post("/completions", body=body, cast_to=object)
    assert isinstance(raw, dict)
    found: list[int] = raw["choices"][0]["prompt_token_ids"]
    return found


def test_sixteen_tokens_if_nothing_is_said(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=None)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("cmpl-")


def test_every_shape_of_prompt_means_the_same(client: openai.OpenAI) -> None:
    ids = ids_of(client, PROMPT)
    text = ask(client).choices[0].text
    assert text
    for shape in ([PROMPT], ids, [ids]):
        assert [choice.text for choice in ask(client, prompt=shape).choices] == [text]


def test_several_prompts_are_answered_in_order_with_all_choices(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "At noon", "The hour"]
    alone = [ask(client, prompt=prompt).choices[0].text for prompt in prompts]
    answer = ask(client, prompt=prompts, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]
    lengths = sum(len(ids_of(client, prompt)) for prompt in prompts)
    assert answer.usage.prompt_tokens == lengths
    assert answer.usage.completion_tokens == 6 * 8


def test_streamed_text_is_the_whole_text(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"prompt": [PROMPT, "At noon"], "n": 2, "temperature": 1, "seed": 3}
    whole = ask(client, **fields)
    options = {"include_usage": True}
    texts = dict.fromkeys(range(4), "")
    chunks = list(ask(client, stream=True, stream_options=options, **fields))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("streams", [False, True])
def test_echo_begins_with_the_prompt(client: openai.OpenAI, streams: bool) -> None:
    plain = ask(client).choices[0].text
    answer = ask(client, echo=True, stream=streams)
    parts = answer if streams else [answer]
    assert "".join(part.choices[0].text for part in parts) == PROMPT + plain


def test_logprobs_in_columns(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=2).choices[0]
    scores = choice.logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset) == 8
    assert all(2 <= len(top) <= 3 or len(set(top)) < 2 for top in scores.top_logprobs)
    for token, own, top in zip(
        scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True
    ):
        assert own == max(top.values())  # greedy
        assert top[token] == own
    assert scores.text_offset[0] == 0
    assert scores.text_offset == sorted(scores.text_offset)


def test_echo_scores_the_prompt_too(client: openai.OpenAI) -> None:
    ids = ids_of(client, PROMPT)
    scores = ask(client, echo=True, logprobs=1).choices[0].logprobs
    assert len(scores.tokens) == len(ids) + 8
    assert scores.token_logprobs[0] is None
    assert all(value < 0 for value in scores.token_logprobs[1:])
    streamed = [
        chunk.choices[0].logprobs for chunk in ask(client, echo=True, logprobs=1, stream=True)
    ]
    joined = [value for part in streamed for value in part.token_logprobs]
    assert joined == scores.token_logprobs


def test_prompt_logprobs_have_one_entry_per_token(client: openai.OpenAI) -> None:
    ids = ids_of(client, PROMPT)
    found = ask(client, extra_body={"prompt_logprobs": 2}).choices[0].prompt_logprobs
    assert found[0] is None
    assert len(found) == len(ids)
    for index, entry in zip(ids[1:], found[1:], strict=True):
        assert str(index) in entry
        assert entry[str(index)]["rank"] >= 1


def test_an_answer_is_the_same_in_a_crowd(client: openai.OpenAI) -> None:
    """Greedy and seeded answers do not depend on who else is there."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [PROMPT[: 5 + 3 * size] for size in range(7)]

    def answer(prompt: str) -> str:
        text: str = ask(client, prompt=prompt, temperature=0.8, seed=len(prompt)).choices[0].text
        return text

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        crowded = list(pool.map(answer, prompts))
    assert crowded == alone
