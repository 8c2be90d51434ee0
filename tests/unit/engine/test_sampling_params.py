"""SamplingParams: every field's range, its one form, and that it survives the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gnomon.engine.messages import EngineRequest, OutputDelta, TokenLogprobs
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import RequestError

GOOD: list[dict[str, Any]] = [
    {"n": 128},
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 1},
    {"top_p": 1e-6},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10**9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"repetition_penalty": 0.1},
    {"min_tokens": 5, "max_tokens": 5},
    {"min_tokens": 5, "max_tokens": None},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"stop": ["x"] * 64},
    {"stop": "y" * 1024},
    {"logit_bias": {0: -100, 5: 100.0}},
]
BAD: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.01),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", float("inf")),
    ("min_tokens", -1),
    ("max_tokens", 0),
    ("seed", 2**63),
    ("seed", 1.0),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("stop", 5),
    ("stop", ["a", 5]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 10_000),
    ("stop", "y" * 1025),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", list(range(257))),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: "much"}),
    ("logit_bias", dict.fromkeys(range(1025), 1)),
    ("ignore_eos", 1),
    ("include_stop_str_in_output", "yes"),
    ("skip_special_tokens", None),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_values_at_the_edge_are_taken(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:30])
def test_what_is_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.status == 400


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 6, more than max_tokens = 5") as caught:
        SamplingParams(min_tokens=6, max_tokens=5)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
def test_stop_has_one_form(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop == ("END",)


def test_lists_and_json_keys_have_one_form() -> None:
    as_in_json: Any = {"7": 1}
    params = SamplingParams(stop_token_ids=[3, 4], logit_bias=as_in_json, temperature=1)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {7: 1.0}
    assert type(params.temperature) is float


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize("fields", [{"stop_token_ids": [10]}, {"logit_bias": {10: 1}}], ids=str)
def test_ids_are_checked_against_the_vocabulary(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    params.validate(11)
    with pytest.raises(RequestError, match="token id 10; this model has ids 0 to 9") as caught:
        params.validate(10)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("ids", "match"),
    [([], "empty"), ([1, 10], "token id 10"), ([-1, 1], "token id -1"), ([1] * 8, "8 tokens")],
)
def test_prompts_are_checked(ids: list[int], match: str) -> None:
    EngineRequest(request_id="a", prompt_token_ids=[0, 9] * 3 + [1]).validate(10, 8)
    with pytest.raises(RequestError, match=match) as caught:
        EngineRequest(request_id="a", prompt_token_ids=ids).validate(10, 8)
    assert caught.value.param == "prompt"


def test_a_too_long_prompt_names_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"has 9 tokens, but .* holds 8") as caught:
        EngineRequest(request_id="a", prompt_token_ids=[1] * 9).validate(10, 8)
    assert caught.value.code == "context_length_exceeded"


def test_messages_survive_the_wire() -> None:
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        params=SamplingParams(stop=["x"], logit_bias={3: 1.0}),
        fork_of="b",
        eos_token_ids=(5, 6),
    )
    logprobs = TokenLogprobs(4, -float("inf"), 9, [(1, -0.5)])
    delta = OutputDelta(
        request_id="a", token_ids=[4], logprobs=[logprobs], prompt_logprobs=[None, logprobs]
    )
    for value in (request, delta):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
