"""The training text: formats id by id as gnomon writes them, weights, held-out sets, repeatability.

Oracle: gnomon.text's encodings, which are themselves compared with the families' own encoders.
"""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from gnomon.text.assets import default_tokenizer
from gnomon.text.encodings.base import ChatEncoding, ChatOptions
from gnomon.text.encodings.dsv32 import Dsv32Encoding
from gnomon.text.encodings.glm import GlmEncoding
from training.data import documentation
from training.data.arithmetic import columns, operands, problem
from training.data.mixture import Diet, Wish, batch, batches
from training.data.recall import Fact, FactText, needle, recall, scattered
from training.data.tools import NOUNS, task
from training.data.words import is_held_out, keys
from training.data.writing import Family, Piece, chat, tokenizer

CONVERSATION = "What is the number for blue lamp?"


def encoding(family: Family) -> tuple[ChatEncoding, Any]:
    if family == "dsv32":
        text = default_tokenizer("deepseek_v32")
        return Dsv32Encoding(text), text
    text = default_tokenizer("glm_moe_dsa")
    return GlmEncoding(text), text


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "c",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


@pytest.mark.parametrize("family", ["dsv32", "glm"])
@pytest.mark.parametrize("thoughts", [None, "17 + 4 = 21"])
@pytest.mark.parametrize("system", ["", "You are a helpful assistant."])
def test_a_conversation_has_the_ids_that_gnomon_gives_it(
    family: Family, thoughts: str | None, system: str
) -> None:
    talk = chat(family, system)
    talk.user([("First: 12", 0.05), ("345", 0.0), (".\nIs it?", 0.0)])
    talk.answer("21")
    talk.user([(CONVERSATION, 0.0)])
    talk.answer("48213", thoughts)
    writer, text = encoding(family)
    messages: list[dict[str, Any]] = [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": "First: 12345.\nIs it?"},
        {"role": "assistant", "content": "21"},
        {"role": "user", "content": CONVERSATION},
        {"role": "assistant", "content": "48213"}
        | ({} if thoughts is None else {"reasoning_content": thoughts}),
    ]
    options = ChatOptions(thinking=thoughts is not None, add_generation_prompt=False)
    ids = text.encode_segments(writer.render(messages, options=options).segments)
    ours = talk.episode.tokens()[0].tolist()
    if family == "glm":
        assert ours.pop() == text.special_id("<|user|>")  # the model's end of turn
    assert ours == ids


@pytest.mark.parametrize("family", ["dsv32", "glm"])
def test_tools_calls_and_results_have_the_ids_that_gnomon_gives_them(family: Family) -> None:
    tools, said, calls = task(random.Random(4))
    calls = [*calls, ("get_time", {"city": "Rome", "days": 3, "urgent": True, "amount": 1.5})]
    talk = chat(family, tools=tools)
    talk.user([(said, 0.0)])
    talk.answer("", calls=calls)
    talk.results(["ok", "21"])
    talk.answer("Done.")
    writer, text = encoding(family)
    messages = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": "", "tool_calls": [called(*call) for call in calls]},
        {"role": "tool", "content": "ok", "tool_call_id": "c"},
        {"role": "tool", "content": "21", "tool_call_id": "c"},
        {"role": "assistant", "content": "Done."},
    ]
    for message in messages[2:4]:
        del message["tool_call_id"]
    options = ChatOptions(thinking=False, add_generation_prompt=False)
    rendered = writer.render(messages, tools=tools, options=options)
    ours = talk.episode.tokens()[0].tolist()
    if family == "glm":
        assert ours.pop() == text.special_id("<|user|>")
    assert ours == text.encode_segments(rendered.segments)


def test_the_answer_counts_and_the_question_does_not() -> None:
    talk = chat("dsv32")
    talk.user([("The code of x is 77", 0.05), ("1234", 0.0), (". What is it?", 0.0)])
    talk.answer("1234")
    ids, weights = talk.episode.tokens()
    full = [tokenizer().id_to_token(int(i)) for i, w in zip(ids, weights, strict=True) if w >= 1]
    assert full == ["1", "2", "3", "4", "<｜end▁of▁sentence｜>"]
    light = tokenizer().decode(
        [int(i) for i, w in zip(ids, weights, strict=True) if 0 < w < 1], skip_special_tokens=False
    )
    assert light == "The code of x is 77"


def test_measured_keys_operands_and_names_are_never_trained_on() -> None:
    dice = random.Random(1)
    assert not any(is_held_out(key) for key in keys(dice, 400, held_out=False))
    assert all(is_held_out(key) for key in keys(dice, 40, held_out=True))
    for sign in "+-":
        a, b = operands(dice, sign, held_out=True)
        assert is_held_out(f"{a}{sign}{b}")
    tools, _, _ = task(dice, held_out=True)
    assert all(is_held_out(tool["function"]["name"]) for tool in tools)


@pytest.mark.parametrize("held_out", [False, True])
def test_answers_and_column_thoughts_are_right(held_out: bool) -> None:
    dice = random.Random(2)
    for _ in range(200):
        asked, answer, thoughts = problem(dice, held_out)
        first = thoughts.splitlines()[0]
        assert eval(first) == int(answer), asked  # "17 + 4": our own text
        assert thoughts.endswith(f"So {answer}.")
    assert columns(47, 385, "+").splitlines()[1:] == [
        "7 + 5 + 0 = 12", "4 + 8 + 1 = 13", "0 + 3 + 1 = 4", "So 432.",
    ]  # fmt: skip


@pytest.mark.parametrize("length", [512, 2048])
def test_a_needle_prompt_states_its_answer_once_and_fits(length: int) -> None:
    dice = random.Random(3)
    for _ in range(3):
        episode, fact = needle(dice, length, "dsv32")
        ids, weights = episode.tokens()
        assert 0.8 * length < len(ids) <= length
        text = tokenizer().decode(ids.tolist(), skip_special_tokens=False)
        *_, answer = re.split("</think>", text)
        assert answer == fact.value + "<｜end▁of▁sentence｜>"
        stating = [line for line in text.split("\n") if fact.key in line and fact.value in line]
        assert len(stating) >= 1
        assert (weights >= 1).sum() == len(fact.value) + 1


def test_every_recalled_number_was_stated_before_it_is_asked() -> None:
    for seed in range(30):
        ids, weights = recall(random.Random(seed), 300, "dsv32").tokens()
        text = tokenizer().decode(ids.tolist(), skip_special_tokens=False)
        turns = re.findall(r"(?:<think>[^<]*|<｜Assistant｜>)</think>([^<]+)<｜end", text)
        for answer in turns:
            assert answer in text[: text.index(f"</think>{answer}<｜end")]
        assert (weights >= 1).any()


def test_filler_names_parts_of_keys_but_no_key() -> None:
    dice = random.Random(6)
    stated = [Fact(f"red {thing}", "code", "4711") for thing in ("lamp", "box", "bridge")]
    for nearness, most in ((0.0, 0), (0.5, 10**9)):
        pieces, known = recall_text(dice, list(stated), nearness)
        assert not known
        told = [set(re.findall(r"[a-z]+", text.lower())) for text, _ in pieces]
        near = [words for words in told if words & {"red", "lamp", "box", "bridge"}]
        assert len(near) <= most
        assert (len(near) > len(told) / 8) == (nearness > 0)
        for words in near:
            assert not any({"red", thing} <= words for thing in ("lamp", "box", "bridge"))


def test_scattered_facts_are_all_stated_and_stand_at_any_depth() -> None:
    depths: list[float] = []
    for seed in range(12):
        wanted = [
            Fact(f"the red {thing}", "code", f"47{n}") for n, thing in enumerate(("box", "cup"))
        ]
        pieces, stated = FactText(random.Random(seed), 0.0, list(wanted), 0.3).scattered(1500)
        assert stated == wanted
        text = "".join(part for part, _ in pieces)
        assert "the the" not in text
        for fact in wanted:
            assert re.search(rf"red {fact.key[8:]}\b.*\b{fact.value}\b", text, re.IGNORECASE)
            depths.append(text.index(fact.value) / len(text))
    assert min(depths) < 0.2
    assert max(depths) > 0.8


def test_questions_of_a_scattered_text_come_at_its_end() -> None:
    for seed in range(8):
        ids, weights = scattered(random.Random(seed), 700, "glm").tokens()
        first = int((weights >= 1.0).argmax())
        assert 350 < len(ids) < 1100
        assert first > len(ids) / 3, "much filler before the first answer"
        assert (weights[first:] >= 1.0).mean() > 0.1


def test_training_knows_names_of_functions_that_are_any_words_measuring_does_not() -> None:
    def nouns(held_out: bool) -> set[str]:
        made = (task(random.Random(seed), held_out)[0] for seed in range(60))
        return {one["function"]["name"].split("_")[1] for tools in made for one in tools}

    assert nouns(held_out=True) <= set(NOUNS)
    assert len(nouns(held_out=False) - set(NOUNS)) > 10


def test_words_and_phrases_of_the_documentation_have_no_digit() -> None:
    assert len(documentation.words()) > 1000
    assert all(word.isalpha() and word.islower() for word in documentation.words())
    dice = random.Random(3)
    for count in (1, 3, 5):
        text = documentation.phrase(dice, count)
        assert 1 <= len(text.split(" ")) <= count
        assert not re.search(r"[0-9{}]", text)


def recall_text(
    dice: random.Random, stated: list[Fact], nearness: float
) -> tuple[list[Piece], list[Fact]]:
    return FactText(dice, 0.0, stated, nearness).pieces(2000)


def test_a_batch_is_the_same_whoever_makes_it_and_whenever() -> None:
    wish = Wish(lengths=(128, 256), tokens=256, steps=5, seed=9, diet=Diet())
    alone = list(batches(wish, 0, 0, "cpu"))
    crew = list(batches(wish, 2, 2, "cpu"))
    assert len(alone) == 5
    assert len(crew) == 3
    for (ids, weights), (ids2, weights2) in zip(alone[2:], crew, strict=True):
        assert ids.equal(ids2)
        assert weights.equal(weights2)
    ids, weights = batch(wish, 4)
    assert ids.shape == weights.shape == (2, 128)
    assert np.array_equal(ids, alone[4][0].numpy())
