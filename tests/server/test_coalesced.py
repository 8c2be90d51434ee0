"""Law: what a late reader gets in few large events is the whole answer, however it was bundled.

The wire's deltas are scripted and go through the real streams, texts and writers; the oracle is the
answer to the same request sent whole, of deltas that came one by one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.engine.messages import EngineRequest, OutputDelta, TokenLogprobs, joined
from gnomon.engine.process_stream import ProcessStream
from gnomon.engine.sampling_params import SamplingParams
from gnomon.frontend.async_llm import DeltaIterator
from gnomon.frontend.choices import ChoiceSet
from gnomon.server.app import create_app
from gnomon.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine

ENGINE = FakeEngine()
TOKENIZER = ENGINE.language.tokenizer
EOS = 1
TEXT_IDS = st.text(alphabet="ab é🦊字", min_size=1, max_size=12).map(TOKENIZER.encode_plain)


class ScriptedEngine(FakeEngine):
    """Every choice brings the scripted ids, in bundles of the given numbers of wire deltas."""

    def __init__(self, ids: Sequence[int], bundles: Sequence[int], fails: bool = False) -> None:
        super().__init__(max_model_len=4096)
        self.ids, self.bundles, self.fails = ids, bundles, fails
        self.feeding: asyncio.Task[None] | None = None
        self.intervals: list[int] = []
        self.metrics = ""

    def abort(self, request_ids: Sequence[str]) -> None:
        """What a DeltaIterator asks of its client: here nothing goes on by itself."""

    async def start(self, prompt_token_ids: Sequence[int], params: SamplingParams, **rest: Any):
        first = EngineRequest(
            request_id=rest["request_id"],
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            eos_token_ids=(EOS,),
        )
        choices = ChoiceSet(first, TOKENIZER)
        self.intervals.append(rest["interval"])
        stream = ProcessStream([one.request_id for one in choices.requests], rest["interval"])
        self.feeding = asyncio.create_task(self.feed(stream, choices.requests))
        return DeltaIterator(self, choices, stream)

    async def feed(self, stream: ProcessStream, requests: Sequence[EngineRequest]) -> None:
        deltas = [self.delta(one, place) for place in range(len(self.ids)) for one in requests] + [
            self.fault(one) for one in requests if self.fails
        ]
        number = 0
        while deltas:
            count = self.bundles[number % len(self.bundles)]
            for delta in deltas[:count]:
                stream.put(delta)
            deltas, number = deltas[count:], number + 1
            for _ in range(6):  # until the reader has taken it all
                await asyncio.sleep(0)

    def delta(self, request: EngineRequest, place: int) -> OutputDelta:
        token = self.ids[(place + request.choice) % len(self.ids)]
        wanted = request.params.logprobs
        is_last = place == len(self.ids) - 1 and not self.fails
        top = [(token, -0.5), (7, -1.5 - place)][: wanted or 0]
        return OutputDelta(
            request_id=request.request_id,
            token_ids=[token],
            logprobs=None if wanted is None else [TokenLogprobs(token, -0.5, 1, top)],
            finish_reason="length" if is_last else None,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    def fault(self, request: EngineRequest) -> OutputDelta:
        return OutputDelta(request_id=request.request_id, finish_reason="error", error="bad luck")


def post(
    engine: ScriptedEngine, path: str, body: dict[str, Any], interval: int = 1
) -> httpx.Response:
    async def run() -> httpx.Response:
        settings = ServerSettings(stream_interval=interval)
        app = create_app(engine, settings)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://house") as client:
            answer = await client.post(path, json=body)
        assert engine.feeding is not None
        await engine.feeding
        engine.metrics = app.state.gnomon.metrics.page().decode()
        return answer

    return asyncio.run(run())


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def put_together(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Text, ids, logprobs and end of each choice, from its events."""
    whole: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in found for choice in event["choices"]):
        one = whole.setdefault(choice["index"], {"text": "", "ids": [], "scores": [], "end": None})
        assert one["end"] is None, "nothing comes behind the end"
        one["text"] += choice["text"] if "text" in choice else choice["delta"]["content"]
        one["ids"] += choice["token_ids"]
        one["scores"] += score_entries(choice["logprobs"])
        one["end"] = choice["finish_reason"] and (choice["finish_reason"], choice["stop_reason"])
    return whole


def score_entries(scores: dict[str, Any] | None) -> list[Any]:
    if scores is None:
        return []
    if "content" in scores:
        return scores["content"]
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return list(zip(*(scores[name] for name in names), strict=True))


def of_whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "ids": choice["token_ids"],
            "scores": score_entries(choice["logprobs"]),
            "end": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in answer["choices"]
    }


@given(
    ids=TEXT_IDS | st.lists(st.integers(3, 4000), min_size=1, max_size=12),
    bundles=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    choices=st.integers(1, 3),
    stop=st.sampled_from([None, "a", " b", "é", "ba", "🦊"]),
    logprobs=st.sampled_from([None, 0, 2]),
    is_chat=st.booleans(),
    least=st.tuples(st.integers(0, 3), st.integers(1, 4)),
)
@settings(max_examples=60)
def test_bundled_events_are_the_whole_answer(
    ids: list[int],
    bundles: list[int],
    choices: int,
    stop: str | None,
    logprobs: int | None,
    is_chat: bool,
    least: tuple[int, int],
) -> None:
    min_tokens, interval = least
    body: dict[str, Any] = {
        "n": choices,
        "max_tokens": max(len(ids), min_tokens),
        "min_tokens": min_tokens,
        "return_token_ids": True,
    }
    body |= {} if stop is None else {"stop": [stop]}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    if is_chat:
        body["messages"] = [{"role": "user", "content": "x"}]
        body |= {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    else:
        body["prompt"] = [5, 6]
        body |= {} if logprobs is None else {"logprobs": logprobs}
    whole = post(ScriptedEngine(ids, [1]), path, body).json()
    body |= {"stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    engine = ScriptedEngine(ids, bundles)
    found = events(post(engine, path, body, interval))
    together = put_together(found)
    assert together == of_whole(whole)
    num_gaps = sum(len(one["ids"]) - 1 for one in together.values())
    assert f"gnomon_inter_token_latency_seconds_count {num_gaps}.0" in engine.metrics
    assert found[-1]["usage"] == whole["usage"]
    so_far = 0
    for event in found[:-1]:
        so_far += sum(len(choice["token_ids"]) for choice in event["choices"])
        assert event["usage"]["completion_tokens"] == so_far


@given(
    ids=st.lists(st.integers(3, 4000), min_size=1, max_size=8),
    bundles=st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
@settings(max_examples=25)
def test_what_came_before_a_fault_is_sent_before_it(ids: list[int], bundles: list[int]) -> None:
    body = {"prompt": [5], "max_tokens": 50, "stream": True, "return_token_ids": True}
    found = events(post(ScriptedEngine(ids, bundles, fails=True), "/v1/completions", body))
    assert found[-1]["error"]["message"] == "bad luck"
    assert [index for event in found[:-1] for index in event["choices"][0]["token_ids"]] == ids


def test_deltas_of_one_look_are_one_event_per_choice() -> None:
    ids = TOKENIZER.encode_plain("a b a b a b")
    body = {"prompt": [5], "n": 2, "max_tokens": len(ids), "stream": True, "return_token_ids": True}
    found = events(post(ScriptedEngine(ids, [4 * len(ids)]), "/v1/completions", body))
    assert [len(event["choices"][0]["token_ids"]) for event in found] == [len(ids), len(ids)]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 9)), max_size=12))
def test_joined_deltas_keep_order_and_tokens(arrived: list[tuple[str, int]]) -> None:
    deltas = [
        OutputDelta(
            request_id=name, token_ids=[token], logprobs=[TokenLogprobs(token, -1.0, 1)],
            queue_s=0.5 if place == 0 else 0.0, num_prompt_tokens=3,
        )
        for place, (name, token) in enumerate(arrived)
    ]  # fmt: skip
    made = joined(deltas)
    names = [delta.request_id for delta in made]
    assert names == list(dict.fromkeys(name for name, _ in arrived))
    for delta in made:
        own = [token for name, token in arrived if name == delta.request_id]
        assert delta.token_ids == own
        assert [score.token_id for score in delta.logprobs or ()] == own
        assert delta.num_prompt_tokens == 3
    assert sum(delta.queue_s for delta in made) == (0.5 if arrived else 0.0)


@pytest.mark.parametrize(
    ("length", "interval", "sizes"),
    [(7, 1, [1] * 7), (9, 3, [1, 3, 3, 2]), (4, 10, [1, 3]), (1, 5, [1])],
)
def test_tokens_wait_for_each_other_but_not_the_first_and_last(
    length: int, interval: int, sizes: list[int]
) -> None:
    body = {"prompt": [5], "max_tokens": length, "stream": True, "return_token_ids": True}
    engine = ScriptedEngine([5] * length, [1])
    found = events(post(engine, "/v1/completions", body, interval))
    assert [len(event["choices"][0]["token_ids"]) for event in found] == sizes


def test_only_who_sees_tokens_come_or_waits_for_a_stop_string_is_told_at_once() -> None:
    engine = ScriptedEngine([5] * 3, [1])
    for extra in ({"stream": True}, {"stop": ["x"]}, {"stop": ["x"], "stream": True}, {}):
        post(engine, "/v1/completions", {"prompt": [5], "max_tokens": 3, **extra}, 4)
    assert engine.intervals == [4, 1, 1, 16]


def test_what_came_together_is_sent_together() -> None:
    """Two choices in bundles of both: as many bodies as bundles, beside [DONE] and the end."""
    sent: list[bytes] = []
    body = json.dumps({"prompt": [5], "n": 2, "max_tokens": 3, "stream": True}).encode()

    async def run() -> None:
        asked = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if asked.is_set():
                await asyncio.Event().wait()
            asked.set()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"])

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await create_app(ScriptedEngine([5, 6, 7], [2]))(scope, receive, send)

    asyncio.run(run())
    assert [one.count(b"data: {") for one in sent] == [2, 2, 2, 0, 0]
