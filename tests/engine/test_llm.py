"""LLM: offline use, shapes of prompts, choices, chat, refusals; nothing is left in the engine."""

from __future__ import annotations

import pytest

from gnomon import LLM, SamplingParams
from gnomon.errors import ConfigError, RequestError, UnsupportedError
from tests.engine.tiny_engine import MODEL, prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, dtype="float32", num_kv_pages=128, block_size=16)


@pytest.fixture(autouse=True)
def _idle_afterwards(llm):
    yield
    llm.core.check_integrity()
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)


def test_every_shape_of_a_prompt_means_its_ids(llm):
    text = "A sundial"
    ids = llm.get_tokenizer().encode_with_specials(text)
    shapes = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    found = llm.generate(shapes, GREEDY)
    alone = [llm.generate(shape, GREEDY)[0] for shape in shapes]
    for output in [*found, *alone]:
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == found[0].outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 8
    assert [output.prompt for output in found] == [text, None, text, None]
    assert found[0].outputs[0].text == llm.get_tokenizer().decode(
        found[0].outputs[0].token_ids, skip_special_tokens=True
    )


def test_order_of_outputs_is_that_of_prompts_with_own_parameters(llm):
    prompts = [prompt(5 + 9 * i, i) for i in range(9)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + 3 * (i % 4)) for i in range(9)]
    found = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in found] == prompts
    assert [len(output.outputs[0].token_ids) for output in found] == [p.max_tokens for p in params]
    assert all(output.outputs[0].finish_reason == "length" for output in found)
    assert all(output.is_finished for output in found)


def test_more_prompts_than_the_queue_holds_all_get_done():
    small = LLM(
        MODEL, dtype="float32", num_kv_pages=40, block_size=16, max_queue_size=4, max_num_seqs=3
    )
    found = small.generate([[1 + i] for i in range(20)], SamplingParams(max_tokens=3, n=2))
    assert [len(output.outputs) for output in found] == [2] * 20
    assert all(len(choice.token_ids) == 3 for output in found for choice in output.outputs)


def test_choices_seeds_and_engine_seed(llm):
    params = SamplingParams(temperature=2.0, max_tokens=6, n=3, seed=4)
    first, second = (llm.generate([[9, 8, 7]], params)[0] for _ in range(2))
    tokens = [choice.token_ids for choice in first.outputs]
    assert [choice.token_ids for choice in second.outputs] == tokens
    assert len({tuple(one) for one in tokens}) == 3
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    unseeded = SamplingParams(temperature=2.0, max_tokens=6)
    one, two = (llm.generate([[9, 8, 7]], unseeded)[0].outputs[0].token_ids for _ in range(2))
    assert one != two


def test_stop_strings_cut_text_and_end_the_request(llm):
    whole = llm.generate("Stop", SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0]
    stop = whole.text[4:7]
    assert stop
    cut = llm.generate("Stop", SamplingParams(temperature=0.0, max_tokens=12, stop=stop))[0]
    assert cut.outputs[0].text == whole.text[: whole.text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert len(cut.outputs[0].token_ids) < 12


def test_logprobs_come_one_per_token(llm):
    output = llm.generate([prompt(20)], SamplingParams(max_tokens=5, logprobs=3, seed=1))[0]
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [one.token_id for one in logprobs] == output.outputs[0].token_ids
    for one in logprobs:
        assert len(one.top) == 3
        best = sorted(one.top, key=lambda pair: -pair[1])
        assert one.top == best
        if one.rank <= 3:
            assert one.top[one.rank - 1][0] == one.token_id


def test_max_tokens_is_16_offline_unless_stated(llm):
    found = llm.generate([[1, 2]], SamplingParams(temperature=0.0, ignore_eos=True))[0]
    assert len(found.outputs[0].token_ids) == 16


def test_cached_tokens_are_reported(llm):
    ids = prompt(50, 77)
    cold = llm.generate([ids], GREEDY)[0]
    warm = llm.generate([ids], GREEDY)[0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_chat_renders_by_the_models_encoding(llm):
    messages = [{"role": "user", "content": "What casts a shadow? </think>"}]
    rendered = llm.language.chat.render(messages)
    found = llm.chat(messages, GREEDY)
    assert len(found) == 1
    assert found[0].prompt_token_ids == llm.get_tokenizer().encode_segments(rendered.segments)
    several = llm.chat([messages, [{"role": "user", "content": "Noon?"}]], GREEDY)
    assert several[0].outputs[0].token_ids == found[0].outputs[0].token_ids
    assert len(several) == 2


@pytest.mark.parametrize(
    ("prompts", "params", "named"),
    [
        ("", GREEDY, None),
        ([[]], GREEDY, "prompt"),
        ([[1], [10**6]], GREEDY, "prompt"),
        ([3.5], GREEDY, "prompts.0"),
        ([{"text": "x"}], GREEDY, "prompts.0"),
        (7, GREEDY, "prompts"),
        ([[1], [2]], [GREEDY], "sampling_params"),
        ([prompt(5000)], GREEDY, "prompt"),
        ([[1]], SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm, prompts, params, named):
    if prompts == "":
        assert llm.generate("", params)[0].prompt_token_ids  # the start token alone
        return
    before = llm.stats().num_steps
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params)
    assert caught.value.param == named
    assert llm.stats().num_steps == before


def test_priorities_need_their_policy(llm):
    with pytest.raises(RequestError, match="scheduling_policy"):
        llm.generate([[1]], GREEDY, priority=[1])


def test_unknown_flags_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(MODEL, max_model_length=9)
    with pytest.raises(ConfigError, match="downloads nothing"):
        LLM("deepseek-ai/DeepSeek-V3.2")


def test_token_ids_only():
    bare = LLM(MODEL, dtype="float32", num_kv_pages=16, tokenizer="none")
    found = bare.generate([[1, 2, 3]], GREEDY)[0].outputs[0]
    assert (found.text, len(found.token_ids)) == ("", 8)
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.generate("text", GREEDY)
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.generate([[1]], SamplingParams(stop="x"))
    with pytest.raises(UnsupportedError):
        bare.get_tokenizer()


@pytest.mark.parametrize("part", ["builder.build", "runner.run", "sampler.launch"])
def test_an_interrupt_leaves_an_idle_engine(llm, monkeypatch, part):
    """Whichever part of the third step is interrupted."""
    owner_name, name = part.split(".")
    owner = getattr(llm.core._parts, owner_name)
    original = getattr(owner, name)
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(9, i) for i in range(4)], SamplingParams(max_tokens=30))
    monkeypatch.setattr(owner, name, original)
    assert len(llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == 8
