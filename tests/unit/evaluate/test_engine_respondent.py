"""The model in this process as a respondent, on random weights: plumbing, not answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gnomon.attention.indices import KeySet, ListSegment
from gnomon.attention.ops.values import Selection
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import ConfigError
from gnomon.evaluate.answering_rows import AnsweringRows
from gnomon.evaluate.arithmetic import ArithmeticSettings, run_arithmetic
from gnomon.evaluate.engine_respondent import EngineRespondent
from gnomon.evaluate.needle import NeedleSettings, listed_share, run_needle
from gnomon.evaluate.respondent import AskSettings, Question, user
from gnomon.frontend.llm import LLM
from gnomon.text.encodings.base import ChatOptions
from tests.unit.evaluate.broken import RandomLists
from tests.unit.evaluate.partners import unheard

MODEL = "random:deepseek_v32,layers=2"
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "num_kv_pages": 200,
    "block_size": 16,
    "max_model_len": 300,
}
GRID = NeedleSettings(lengths="180,280", depths=2, keys=2, samples=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(MODEL, **FLAGS)
    yield made
    made.core.close()


def test_a_needle_run_tells_tokens_and_lists(llm: LLM) -> None:
    ask = AskSettings(answer_tokens=6)
    seen: list[tuple[int, int]] = []
    result = run_needle(EngineRespondent(llm, ask), GRID, ask, lambda *now: seen.append(now))
    assert result.score.num_cases == 8
    assert result.lengths == (180, 280)
    assert (0, 8) in seen
    assert seen[-1] == (8, 8)
    for case in result.cases:
        assert 0.7 * case.length < case.answer.num_prompt_tokens <= case.length - 6
        assert set(case.answer.listed or ()) == {0, 1}
    share = listed_share(result.cases)
    assert share is not None
    assert 0.0 <= share < 1.0
    assert result.usage.num_cached_tokens > 0  # the second question found its text
    assert llm.core.taps is None
    llm.core.check_integrity()


def test_the_prompt_is_that_of_the_chat(llm: LLM) -> None:
    for thinking, option in (("off", False), ("on", True)):
        ask = AskSettings(thinking=thinking, answer_tokens=2)
        respondent = EngineRespondent(llm, ask)
        messages = (user("What is 3 + 4?"),)
        rendered = llm.language.chat.render(messages, options=ChatOptions(thinking=option))
        ids = llm.get_tokenizer().encode_segments(rendered.segments)
        (answer,) = respondent.ask([Question(messages, 2)], unheard)
        assert answer.num_prompt_tokens == len(ids) == respondent.num_tokens(messages)
        assert answer.num_output_tokens == 2
        assert answer.finish_reason == "length"
        assert answer.listed is None  # nothing was watched


def test_answers_are_those_of_the_engine_whatever_the_groups(llm: LLM) -> None:
    ask = AskSettings(answer_tokens=4)
    settings = ArithmeticSettings(num_sums=40)  # more than one group
    result = run_arithmetic(EngineRespondent(llm, ask), settings, ask, unheard)
    assert [solved.answer.num_output_tokens for solved in result.solved] == [4] * 40
    one = result.solved[37]
    output = llm.chat(
        [user(one.sum.text)],
        SamplingParams(temperature=0.0, max_tokens=4),
        options=ChatOptions(thinking=False),
    )
    assert output[0].outputs[0].text.strip() == one.answer.text


def test_a_tap_may_change_what_is_attended(llm: LLM) -> None:
    """Answers hang on the lists that the tap gives; tests of a broken selection lean on it."""

    class FirstKeys(AnsweringRows):
        def index(self, layer: int, selection: Selection) -> KeySet:
            keys = super().index(layer, selection)
            (segment,) = keys.segments
            assert isinstance(segment, ListSegment)
            kept = segment.count.clamp(max=1)
            ids = segment.ids.clone()
            ids[:, 1:] = -1
            return KeySet(keys.axis, (ListSegment(segment.part, segment.space, ids, kept),))

    ask = AskSettings(answer_tokens=8)
    llm.core.reset_prefix_cache()
    sound = run_needle(EngineRespondent(llm, ask), GRID, ask, unheard)
    llm.core.reset_prefix_cache()
    broken = run_needle(EngineRespondent(llm, ask, FirstKeys()), GRID, ask, unheard)
    llm.core.reset_prefix_cache()
    assert [c.answer.text for c in sound.cases] != [c.answer.text for c in broken.cases]


def test_every_key_attended_has_no_lists() -> None:
    flags = {**FLAGS, "hf_overrides": {"index_topk": 4096}, "dense_route": "always_when_allowed"}
    llm = LLM(MODEL, **flags)
    ask = AskSettings(answer_tokens=2)
    result = run_needle(EngineRespondent(llm, ask), GRID, ask, unheard)
    assert listed_share(result.cases) == 1.0


def test_concurrency_is_a_server_s_matter(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        EngineRespondent(llm, AskSettings(concurrency=3))


def test_a_length_beyond_the_context_is_refused(llm: LLM) -> None:
    respondent = EngineRespondent(llm, AskSettings())
    with pytest.raises(ConfigError, match="context holds 300"):
        run_needle(respondent, NeedleSettings(lengths="301"), AskSettings(), unheard)


def test_random_lists_are_valid_lists(llm: LLM) -> None:
    class Checked(RandomLists):
        num_changed = 0

        def index(self, layer: int, selection: Selection) -> KeySet:
            keys = super().index(layer, selection)
            keys.check()
            (old,), (new,) = selection.keys.segments, keys.segments
            assert isinstance(old, ListSegment)
            assert isinstance(new, ListSegment)
            Checked.num_changed += not old.ids.equal(new.ids)
            return keys

    ask = AskSettings(answer_tokens=3)
    llm.core.reset_prefix_cache()
    run_needle(EngineRespondent(llm, ask, Checked()), GRID, ask, unheard)
    llm.core.reset_prefix_cache()
    assert Checked.num_changed > 0


def test_every_question_has_its_own_noise(llm: LLM) -> None:
    ask = AskSettings(temperature=1.0, question_seed=3)
    questions = [Question((user("Say something."),), 5)] * 34  # more than one group
    texts = [answer.text for answer in EngineRespondent(llm, ask).ask(questions, unheard)]
    assert len(set(texts)) > 30
    assert texts == [answer.text for answer in EngineRespondent(llm, ask).ask(questions, unheard)]
