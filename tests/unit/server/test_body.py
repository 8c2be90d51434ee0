"""Bodies to models: the field at fault is named, whatever shape the body has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import RequestError
from gnomon.server.body import parse_model
from gnomon.server.request_fields import GenerationRequest
from gnomon.server.request_types import ChatRequest, CompletionRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "unknown"})


def refusal(data: bytes, model: type[GenerationRequest]) -> RequestError | None:
    try:
        parse_model(data, model)
    except RequestError as error:
        return error
    return None


@given(body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_object_is_a_model_or_a_request_error(body: dict[str, Any]) -> None:
    data = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    error = refusal(data, ChatRequest)
    if error is not None:
        assert error.status == 400
        assert error.param
        assert error.param.split(".")[0] in body
        assert len(str(error)) < 500


@given(data=st.binary(max_size=40))
def test_any_bytes_are_a_model_or_a_request_error(data: bytes) -> None:
    with pytest.raises(RequestError):
        parse_model(data, CompletionRequest)


BOUNDS: list[tuple[str, Any, Any]] = [
    ("temperature", 0, -0.01),
    ("temperature", 2, 2.01),
    ("top_p", 1, 1.01),
    ("top_p", 0.001, 0),
    ("top_k", -1, -2),
    ("min_p", 0, -0.1),
    ("min_p", 1, 1.1),
    ("presence_penalty", -2, -2.1),
    ("presence_penalty", 2, 2.1),
    ("frequency_penalty", -2, -2.1),
    ("frequency_penalty", 2, 2.1),
    ("repetition_penalty", 0.01, 0),
    ("n", 1, 0),
    ("n", 128, 129),
    ("min_tokens", 0, -1),
    ("max_tokens", 1, 0),
    ("seed", -(2**63), -(2**63) - 1),
    ("seed", 2**63 - 1, 2**63),
    ("prompt_logprobs", 20, 21),
    ("prompt_logprobs", 0, -1),
    ("stop", ["a"] * 64, ["a"] * 65),
    ("stop", "a" * 1024, "a" * 1025),
    ("stop", "a", ""),
    ("stop_token_ids", [0], [-1]),
    ("stop_token_ids", [1] * 256, [1] * 257),
    ("logit_bias", {"1": 100}, {"1": 100.1}),
]


@pytest.mark.parametrize(("name", "allowed", "refused"), BOUNDS)
def test_bounds_are_those_of_sampling_params(name: str, allowed: Any, refused: Any) -> None:
    """The page promises what the engine keeps: both take the last value and refuse the next."""
    assert name in GenerationRequest.model_fields
    parse_model(json.dumps({"prompt": "a", name: allowed}).encode(), CompletionRequest)
    SamplingParams(**{name: allowed})
    with pytest.raises(RequestError) as by_page:
        parse_model(json.dumps({"prompt": "a", name: refused}).encode(), CompletionRequest)
    with pytest.raises(RequestError) as by_engine:
        SamplingParams(**{name: refused})
    assert by_page.value.param is not None
    assert by_page.value.param.split(".")[0] == by_engine.value.param == name


def test_the_message_says_name_value_and_what_is_allowed() -> None:
    with pytest.raises(RequestError) as caught:
        parse_model(b'{"prompt": "a", "temperature": 3, "n": 0}', CompletionRequest)
    message = str(caught.value)
    for part in ("n is 0", "greater than or equal to 1", "1 more fields"):
        assert part in message
