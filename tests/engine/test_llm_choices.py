"""Tokens back to text: stop strings at every split, hidden end tokens, choices of one request."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.engine.messages import EngineRequest, OutputDelta, TokenLogprobs
from gnomon.engine.sampling_params import SamplingParams
from gnomon.frontend.choices import ChoiceSet, ChoiceText, choice_requests
from gnomon.text.assets import default_tokenizer

TOKENIZER = default_tokenizer("deepseek_v32")
TEXT = "The gnomon of a sundial, 影 and light: naïve café 😀 stop here. And more after it."
IDS = TOKENIZER.encode_plain(TEXT)


def deltas(ids, cuts, reason="length", **fields) -> list[OutputDelta]:
    """The ids cut into portions; the last one carries the reason."""
    edges = [0, *sorted(cuts), len(ids)]
    parts = [ids[a:b] for a, b in pairwise(edges) if a < b]
    return [
        OutputDelta(
            request_id="r",
            token_ids=part,
            finish_reason=reason if place == len(parts) - 1 else None,
            **fields,
        )
        for place, part in enumerate(parts)
    ]


def read(params, portions):
    """(text, token ids, last Delta) of the portions up to the end of the choice."""
    choice = ChoiceText(0, params, TOKENIZER)
    made = []
    for portion in portions:
        made.append(choice.feed("r", portion))
        if choice.is_finished:
            break
    text = "".join(one.text for one in made)
    return text, [token for one in made for token in one.token_ids], made[-1]


CUTS = st.lists(st.integers(1, len(IDS) - 1), unique=True)


@settings(deadline=None)
@given(cuts=CUTS)
def test_streamed_text_is_whole_text(cuts):
    text, ids, last = read(SamplingParams(), deltas(IDS, cuts))
    assert (text, ids, last.finish_reason) == (TEXT, IDS, "length")


@settings(deadline=None)
@given(cuts=CUTS, include=st.booleans())
def test_a_stop_string_ends_text_and_tokens_at_every_split(cuts, include):
    params = SamplingParams(stop=["nowhere", "stop he"], include_stop_str_in_output=include)
    text, ids, last = read(params, deltas(IDS, cuts))
    end = TEXT.index("stop he") + (len("stop he") if include else 0)
    assert text == TEXT[:end]
    assert (last.finish_reason, last.stop_reason) == ("stop", "stop he")
    assert ids == IDS[: len(ids)]
    shorter, whole = TOKENIZER.decode(ids[:-1]), TOKENIZER.decode(ids)
    assert "stop he" in whole
    assert "stop he" not in shorter


def test_a_stop_string_wins_over_length_at_the_same_token():
    choice = deltas(IDS[:5], [], reason="length")
    stop = TOKENIZER.decode(IDS[:5])[-3:]
    text, _, last = read(SamplingParams(stop=stop), choice)
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert text == TOKENIZER.decode(IDS[:5])[:-3]


def test_stop_strings_wait_for_min_tokens():
    stop = TOKENIZER.decode(IDS[1:2])
    params = SamplingParams(stop=stop, min_tokens=4)
    text, ids, last = read(params, deltas(IDS[:4] + IDS[1:2] + IDS[5:9], [1, 3]))
    assert ids == IDS[:4] + IDS[1:2]
    assert text == TOKENIZER.decode(IDS[:4])
    assert last.stop_reason == stop


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_is_not_text(include):
    end = TOKENIZER.eos_ids[0]
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
    text, ids, last = read(params, deltas([*IDS[:4], end], [2], reason="stop"))
    assert ids == [*IDS[:4], end]
    assert text == TOKENIZER.decode([*IDS[:4], end] if include else IDS[:4])
    assert last.finish_reason == "stop"


def test_half_a_character_at_the_end_is_shown_as_such():
    ids = TOKENIZER.encode_plain("😀")
    assert len(ids) > 1
    text, _, _ = read(SamplingParams(), deltas(ids[:-1], []))
    assert text == "�"


def test_logprobs_are_cut_with_the_tokens():
    stop = TOKENIZER.decode(IDS[2:3])
    logprobs = [TokenLogprobs(token, -1.0, 1) for token in IDS[:6]]
    portion = OutputDelta(request_id="r", token_ids=IDS[:6], logprobs=logprobs)
    _, ids, last = read(SamplingParams(stop=stop, logprobs=0), [portion])
    assert last.logprobs is not None
    assert [one.token_id for one in last.logprobs] == ids == IDS[:3]


def test_without_a_tokenizer_there_are_only_ids():
    choice = ChoiceText(0, SamplingParams(), None)
    made = choice.feed("r", OutputDelta(request_id="r", token_ids=[5, 6], finish_reason="length"))
    assert (made.text, made.token_ids, made.finish_reason) == ("", (5, 6), "length")


def test_choices_are_forks_of_the_first():
    params = SamplingParams(n=3, prompt_logprobs=1, stop=["sto"])
    first = EngineRequest(request_id="r", prompt_token_ids=[1, 2], params=params, cache_salt="s")
    made = choice_requests(first)
    assert [one.choice for one in made] == [0, 1, 2]
    assert [one.fork_of for one in made] == [None, "r", "r"]
    assert len({one.request_id for one in made}) == 3
    assert {one.cache_salt for one in made} == {"s"}
    assert [one.params.prompt_logprobs for one in made] == [1, None, None]


def test_a_set_ends_choice_by_choice_and_says_whom_to_abort():
    params = SamplingParams(n=2, stop=TOKENIZER.decode(IDS[1:2]))
    chosen = ChoiceSet(
        EngineRequest(request_id="r", prompt_token_ids=[1], params=params), TOKENIZER
    )
    names = chosen.open_ids
    made, must_abort = chosen.feed(OutputDelta(request_id=names[1], token_ids=IDS[:2]))
    assert made is not None
    assert (made.index, made.finish_reason, must_abort) == (1, "stop", True)
    late = OutputDelta(request_id=names[1], token_ids=[3], finish_reason="abort")
    assert chosen.feed(late) == (None, False)
    ended = OutputDelta(request_id=names[0], token_ids=IDS[:2], finish_reason="length")
    made, must_abort = chosen.feed(ended)
    assert made is not None
    assert (made.index, made.finish_reason, must_abort) == (0, "stop", False)
    assert chosen.open_ids == []
