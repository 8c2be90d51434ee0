"""Needles: where they stand, how long texts get, what counts as right, whole runs."""

from __future__ import annotations

import json
import random
import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.evaluate import needle_text
from gnomon.evaluate.needle import (
    ANSWER_TOKENS,
    DEFAULT_LENGTHS,
    NeedleSettings,
    choose_lengths,
    is_match,
    listed_share,
    run_needle,
)
from gnomon.evaluate.needle_context import draw_context
from gnomon.evaluate.respondent import AskSettings
from tests.unit.evaluate.partners import Scripted, unheard
from training.data import wording, words

SMALL = NeedleSettings(lengths="200,400", depths=4, keys=3, samples=2)


def facts_of(prompt: str) -> dict[str, str]:
    """Key -> number, read from the words of a prompt."""
    text, _, _ = prompt.rpartition("\n\n")
    patterns = [
        re.escape(template).replace(r"\{key\}", "(.+?)").replace(r"\{value\}", "([0-9]{4,6})")
        for template in needle_text.STATEMENTS
    ]
    found = [pair for pattern in patterns for pair in re.findall(pattern, text)]
    return dict(found)


def look_up(prompt: str) -> str:
    """The right answer."""
    question = prompt.rpartition("\n\n")[2]
    (value,) = [value for key, value in facts_of(prompt).items() if key in question]
    return value


def another(prompt: str) -> str:
    """The number of another fact of the same text."""
    right = look_up(prompt)
    return next(value for value in facts_of(prompt).values() if value != right)


@given(
    seed=st.integers(0, 10**6),
    num_chars=st.integers(1500, 6000),
    depths=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    num_keys=st.integers(1, 6),
)
def test_facts_stand_where_they_should(
    seed: int, num_chars: int, depths: list[float], num_keys: int
) -> None:
    context = draw_context(random.Random(seed), num_chars, depths, num_keys)
    stated = facts_of(context.text + "\n\n?")
    assert len(stated) == max(num_keys, len(depths))
    assert [one.depth for one in context.asked] == depths
    without = re.sub("|".join(_sentences(context.text, stated)), "", context.text)
    for one in context.asked:
        assert stated[one.fact.key] == one.fact.value
        assert context.prompt(one).count(one.fact.value) == 1
        assert context.prompt(one).count(one.fact.key) == 2  # where it is stated, and asked
        before = context.text[: context.text.index(one.fact.value)]
        num_before = len(re.sub("|".join(_sentences(context.text, stated)), "", before))
        assert abs(num_before / len(without) - one.depth) < 260 / len(without)
        assert num_chars - 260 < len(context.prompt(one)) <= num_chars


def test_the_filler_mentions_no_key() -> None:
    for seed in range(12):
        context = draw_context(random.Random(seed), 20_000, (0.2, 0.5, 0.8), 8)
        for key in facts_of(context.text + "\n\n?"):
            assert context.text.count(key.removeprefix("the ")) == 1


def _sentences(text: str, stated: dict[str, str]) -> list[str]:
    """The sentences of facts, as patterns that match their beginnings too."""
    patterns = []
    for template in needle_text.STATEMENTS:
        head = template.split("{value}")[0]
        for key, value in stated.items():
            start = head.format(key=key)
            if start + value in text:
                patterns.append(re.escape(start) + f"(?:{value}[.]\\s*)?$|" + re.escape(start)
                                + f"{value}[.]\\s*")  # fmt: skip
    return patterns


def test_keys_and_wordings_were_never_trained_on() -> None:
    dice = random.Random(5)
    for fact in needle_text.facts(dice, 60):
        key = fact.key.removeprefix("the ")
        assert zlib.crc32(key.encode()) % 8 == 0
        assert words.is_held_out(key)
        assert not re.search("[0-9]", fact.key)
        assert re.fullmatch("[1-9][0-9]{3,5}", fact.value)
    own = {*needle_text.STATEMENTS, *needle_text.QUESTIONS}
    trained = {
        draw(dice).replace("{noun}", "number").strip()
        for draw in (wording.statement_template, wording.question_template)
        for _ in range(20_000)
    }
    assert {"What is the number for {key}?", "The number for {key} is {value}."} <= trained
    assert not trained & own
    held_out = {*wording.HELD_OUT_STATEMENTS, *wording.HELD_OUT_QUESTIONS}  # measured in training
    assert not {text.replace("{noun}", "number") for text in held_out} & own


def test_filler_holds_short_numbers_only() -> None:
    dice = random.Random(1)
    text = " ".join(needle_text.filler(dice) for _ in range(2000))
    assert max(map(len, re.findall("[0-9]+", text))) == 3


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("48213", True),
        ("The number for the silver harp is 48213.", True),
        ("48,213", True),
        ("48213, yes, 48213", True),
        ("48214", False),
        ("148213", False),
        ("482130", False),
        ("4821", False),
        ("48213 or 48214", False),
        ("4 8 2 1 3", False),
        ("048213", False),
        ("1. 48213", False),
        ("", False),
    ],
)
def test_exact_match(text: str, is_right: bool) -> None:
    assert is_match(text, "48213") is is_right


def test_a_perfect_respondent_scores_everything() -> None:
    partner = Scripted(look_up, listed={0: True, 2: False})
    seen: list[tuple[int, int]] = []
    result = run_needle(partner, SMALL, AskSettings(), lambda *now: seen.append(now))
    assert result.score.share == 1.0
    assert result.score.num_cases == 2 * 4 * 2
    assert all(len(result.at(n, depth)) == 2 for n in (200, 400) for depth in (0, 1 / 3, 2 / 3, 1))
    assert seen[-1] == (16, 16)
    assert partner.rounds == [8, 4, 4]  # each text once, then those with more facts again
    for case, question in zip(result.cases, partner.asked, strict=True):
        prompt = question.messages[0]["content"]
        assert question.watched == case.asked.fact.value == look_up(prompt)
        assert len(facts_of(prompt)) == 3
        size = case.answer.num_prompt_tokens + ANSWER_TOKENS
        assert 0.6 * case.length < size <= case.length
    assert listed_share(result.cases) == 0.5
    assert {layer: score.share for layer, score in result.by_layer().items()} == {0: 1.0, 2: 0.0}
    report = json.loads(json.dumps(result.as_json()))
    assert report["score"]["correct"] == report["score"]["n"] == 16
    assert [cell["n"] for cell in report["grid"]] == [2] * 8
    assert report["listed_share"] == 0.5
    assert report["listed_by_layer"]["2"]["share"] == 0.0
    assert report["by_length"]["400"]["n"] == 8
    assert report["cases"][0]["expected"] == report["cases"][0]["answer"]


def test_the_number_of_another_key_is_wrong() -> None:
    result = run_needle(Scripted(another), SMALL, AskSettings(), unheard)
    assert result.score.num_correct == 0
    assert listed_share(result.cases) is None
    assert result.by_layer() == {}


def test_all_numbers_at_once_are_wrong() -> None:
    partner = Scripted(lambda prompt: " ".join(facts_of(prompt).values()))
    assert run_needle(partner, SMALL, AskSettings(), unheard).score.num_correct == 0


def test_a_run_repeats_by_its_seed() -> None:
    prompts = []
    for seed in (3, 3, 4):
        partner = Scripted(look_up)
        run_needle(partner, SMALL, AskSettings(question_seed=seed), unheard)
        prompts.append([question.messages for question in partner.asked])
    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]


def test_every_key_attended_counts_as_listed() -> None:
    result = run_needle(Scripted(look_up, listed={}), SMALL, AskSettings(), unheard)
    assert listed_share(result.cases) == 1.0
    assert result.by_layer() == {}


def test_lengths_fit_the_model() -> None:
    assert choose_lengths(NeedleSettings(), None) == DEFAULT_LENGTHS
    assert choose_lengths(NeedleSettings(), 2048) == (512, 1024, 2048)
    assert choose_lengths(NeedleSettings(lengths="300,200,300"), 300) == (200, 300)
    with pytest.raises(ConfigError, match="holds 301, but the model's context holds 300"):
        choose_lengths(NeedleSettings(lengths="200,301"), 300)
    with pytest.raises(ConfigError, match="give --lengths"):
        choose_lengths(NeedleSettings(), 300)
    with pytest.raises(ConfigError, match="length 200 leaves"):
        run_needle(Scripted(look_up), SMALL, AskSettings(answer_tokens=180), unheard)


@pytest.mark.parametrize("lengths", ["", "many", "127", "512,", "512;1024", "-512"])
def test_lengths_that_are_none(lengths: str) -> None:
    with pytest.raises(ConfigError, match="lengths is"):
        NeedleSettings(lengths=lengths)


def test_a_respondent_that_does_not_count_is_refused() -> None:
    class Silent(Scripted):
        def num_tokens(self, messages: object) -> int:
            return 0

    with pytest.raises(ConfigError, match=r"usage\.prompt_tokens"):
        run_needle(Silent(look_up), SMALL, AskSettings(), unheard)
