"""/v1/chat/completions through the official openai client, with a real engine behind it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which way is north? 北はどちら"},
]


def ask(client: openai.OpenAI, **more: Any) -> Any:
    fields = {"model": "sundial", "messages": MESSAGES, "max_tokens": 12, "seed": 7, **more}
    return client.chat.completions.create(**fields)


def collect(stream: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """(text per choice, finish reason per choice, chunks)."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


def test_whole_answer_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "sundial"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert usage.prompt_cache_hit_tokens == usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"temperature": 0},
        {"stop": ["e", "of the"], "max_tokens": 40},
        {"logprobs": True, "top_logprobs": 2},
        {"frequency_penalty": 1.5, "top_p": 0.7, "extra_body": {"top_k": 20, "min_p": 0.01}},
    ],
    ids=["plain", "n", "greedy", "stop", "logprobs", "penalties"],
)
def test_streamed_text_is_the_whole_text(client: openai.OpenAI, more: dict[str, Any]) -> None:
    whole = ask(client, **more)
    texts, reasons, _ = collect(ask(client, stream=True, **more))
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_stream_begins_with_the_role_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    _, _, chunks = collect(ask(client, stream=True, stream_options=options, n=2))
    first = {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            first.setdefault(choice.index, choice.delta.role)
    assert first == {0: "assistant", 1: "assistant"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_continuous_usage_counts_up(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, _, chunks = collect(ask(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 12


def test_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    first, second = (ask(client, n=3, max_tokens=16) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]
    assert first.usage.completion_tokens == 48


def test_logprobs_name_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    answer = ask(
        client, temperature=0, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True}
    )
    [choice] = answer.choices
    entries = choice.logprobs.content
    assert len(entries) == len(choice.token_ids) == 12
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.decode("utf-8", errors="replace") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the best
        assert entry.bytes == entry.top_logprobs[0].bytes
        scores = [top.logprob for top in entry.top_logprobs]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] <= 0


def test_logprobs_without_top_are_for_the_chosen_token_only(client: openai.OpenAI) -> None:
    [choice] = ask(client, logprobs=True).choices
    assert all(entry.top_logprobs == [] for entry in choice.logprobs.content)
    assert ask(client).choices[0].logprobs is None


def test_a_stop_string_cuts_the_text_before_it(client: openai.OpenAI) -> None:
    free = ask(client, max_tokens=40).choices[0].message.content
    stop = free[len(free) // 2 : len(free) // 2 + 2]
    cut = ask(client, max_tokens=40, stop=stop).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop
    assert cut.message.content == free[: free.index(stop)]
    kept = ask(client, max_tokens=40, stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == free[: free.index(stop)] + stop


def test_a_stop_token_ends_the_answer(client: openai.OpenAI) -> None:
    ids = ask(client, extra_body={"return_token_ids": True}).choices[0].token_ids
    place = next(place for place in range(3, 12) if ids[place] not in ids[:place])
    more = {"stop_token_ids": [ids[place]], "return_token_ids": True}
    choice = ask(client, extra_body=more).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == ids[place]
    assert choice.token_ids == ids[: place + 1]


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    words = [{"role": "user", "content": "A prompt of several pages. " * 8}]
    again = {"extra_body": {"cache_salt": "of its own"}}
    first = ask(client, messages=words, **again).usage
    second = ask(client, messages=words, **again).usage
    other = ask(client, messages=words, extra_body={"cache_salt": "another"}).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens > 0
    assert second.prompt_tokens_details.cached_tokens % 16 == 0  # whole pages of the fixture
    assert other.prompt_tokens_details.cached_tokens == 0


def test_tools_stand_in_the_prompt_unless_tool_choice_is_none(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "look_at_the_sun", "parameters": {}}}
    bare = ask(client).usage.prompt_tokens
    shown = ask(client, tools=[tool]).usage.prompt_tokens
    hidden = ask(client, tools=[tool], tool_choice="none").usage.prompt_tokens
    assert hidden == bare < shown


def test_an_open_message_is_continued(client: openai.OpenAI) -> None:
    open_turn = [*MESSAGES, {"role": "assistant", "content": "North is"}]
    extra = {"continue_final_message": True, "return_token_ids": True}
    answer = ask(client, messages=open_turn, extra_body=extra)
    closed = ask(client, messages=open_turn, extra_body={"return_token_ids": True})
    assert len(answer.prompt_token_ids) < len(closed.prompt_token_ids)


def test_the_ids_asked_for_are_those_of_the_prompt(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    whole = ask(client, extra_body=extra)
    _, _, chunks = collect(ask(client, stream=True, extra_body=extra))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    streamed = [index for chunk in chunks for index in chunk.choices[0].token_ids]
    assert streamed == whole.choices[0].token_ids


def test_names_of_requests_come_back(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="sundial", messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id == "chatcmpl-mine"
    assert ask(client, extra_body={"request_id": "yours"}).id == "chatcmpl-yours"
