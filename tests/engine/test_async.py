"""AsyncLLM over a real engine process: tokens as offline, streams, aborts, death, drain."""

from __future__ import annotations

import asyncio
import gc

import pytest

from gnomon import LLM, AsyncLLM, SamplingParams
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError, EngineDeadError, RequestError
from tests.engine.tiny_engine import MODEL, prompt

FLAGS = {"model": MODEL, "dtype": "float32", "num_kv_pages": 128, "block_size": 16}
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(**FLAGS)


async def whole(deltas):
    """(text, token ids, last Delta) by choice of one request."""
    found = {}
    async for delta in deltas:
        text, ids, _ = found.get(delta.index, ("", [], None))
        found[delta.index] = (text + delta.text, [*ids, *delta.token_ids], delta)
    return found


async def until_idle(llm: AsyncLLM) -> None:
    """Run a short request: what the engine reports after it shows what is left of the others."""
    await whole(llm.generate([1], SamplingParams(max_tokens=1)))
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert llm.client.num_in_flight == 0


async def same_as_offline(llm: AsyncLLM, offline: LLM) -> None:
    """Twelve requests at once, of text and ids, sampled and greedy, with choices and stops."""
    cases = [
        (
            prompt(3 + 7 * i, i),
            SamplingParams(temperature=1.0, seed=i, max_tokens=5 + i, n=1 + i % 3),
        )
        for i in range(10)
    ]
    cases.append(("A sundial shows", SamplingParams(temperature=0.0, max_tokens=12)))
    text = offline.generate(*cases[-1])[0].outputs[0].text
    cases.append((cases[-1][0], SamplingParams(temperature=0.0, max_tokens=12, stop=text[3:6])))
    expected = [offline.generate([ids], params)[0] for ids, params in cases]
    found = await asyncio.gather(*(whole(llm.generate(ids, params)) for ids, params in cases))
    for one, output in zip(found, expected, strict=True):
        assert len(one) == len(output.outputs)
        for choice in output.outputs:
            text, ids, last = one[choice.index]
            assert (text, ids) == (choice.text, choice.token_ids)
            assert last.finish_reason == choice.finish_reason
            assert last.num_prompt_tokens == len(output.prompt_token_ids)
    assert found[-1][0][2].stop_reason == expected[-1].outputs[0].stop_reason is not None
    chat = [{"role": "user", "content": "noon?"}]
    answer = await whole(llm.generate(chat, SamplingParams(temperature=0.0, max_tokens=6)))
    assert (
        answer[0][1]
        == offline.chat(chat, SamplingParams(temperature=0.0, max_tokens=6))[0].outputs[0].token_ids
    )


async def vanishing_clients(llm: AsyncLLM) -> None:
    """Iterators that are closed before the first delta, after some, dropped, or cancelled."""
    unread = await llm.start(prompt(40, 1), LONG, request_id="unread")
    await unread.aclose()
    await unread.aclose()
    many = SamplingParams(max_tokens=1500, n=3, ignore_eos=True)
    some = await llm.start(prompt(40, 2), many, request_id="some")
    for _ in range(5):
        await anext(some)
    await some.aclose()
    assert all([delta.index < 3 async for delta in some])  # it ends
    dropped = await llm.start(prompt(40, 3), LONG, request_id="dropped")
    await anext(dropped)
    del dropped
    gc.collect()
    task = asyncio.create_task(whole(llm.generate(prompt(40, 4), LONG)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    await asyncio.sleep(0)
    await until_idle(llm)


async def refusals(llm: AsyncLLM) -> None:
    """Raised by start, before any delta, with the field named."""
    for ids, params, field in (
        ([], SamplingParams(), "prompt"),
        ([10**6], SamplingParams(), "prompt"),
        (prompt(5000), SamplingParams(), "prompt"),
        ([1], SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
    ):
        with pytest.raises(RequestError) as caught:
            await llm.start(ids, params, request_id="bad")
        assert caught.value.param == field
    running = await llm.start([1], LONG, request_id="twin")
    await anext(running)
    with pytest.raises(RequestError, match="in use"):
        await llm.start([1], LONG, request_id="twin")
    await running.aclose()
    await until_idle(llm)


async def death(llm: AsyncLLM) -> None:
    """Kill -9: streams raise, health turns, new requests are refused."""
    streams = [await llm.start(prompt(30, i), LONG, request_id=f"d{i}") for i in range(3)]
    await anext(streams[0])
    llm.client._process.process.kill()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await whole(stream)
    assert not llm.is_healthy
    with pytest.raises(EngineDeadError):
        await llm.start([1], LONG, request_id="late")


def test_a_life_in_one_engine(offline):
    """One engine process for all: starting one takes seconds."""
    reports = []
    llm = AsyncLLM(EngineConfig.of(**FLAGS), lambda *report: reports.append(report))
    assert llm.info.vocab_size == llm.tokenizer.vocab_size
    assert llm.encoding is not None

    async def life():
        async with llm:
            assert llm.is_healthy
            await same_as_offline(llm, offline)
            await vanishing_clients(llm)
            await refusals(llm)
            llm.reset_prefix_cache()
            await until_idle(llm)
            await death(llm)

    asyncio.run(life())


def test_a_drain_finishes_what_runs():
    llm = AsyncLLM(EngineConfig.of(**FLAGS))

    async def life():
        async with llm:
            short = await llm.start([1, 2], SamplingParams(max_tokens=4), request_id="short")
            endless = await llm.start([1], LONG, request_id="long")
            await anext(endless)
            await llm.drain(0.2)
            assert not llm.is_healthy
            with pytest.raises(EngineDeadError):
                await llm.start([1], LONG, request_id="late")
            assert (await whole(short))[0][2].finish_reason in ("length", "stop")
            assert (await whole(endless))[0][2].finish_reason == "abort"

    asyncio.run(life())


def test_a_bad_start_is_the_engines_own_error():
    with pytest.raises(ConfigError, match="max_model_len"):
        AsyncLLM(EngineConfig.of(**FLAGS, max_model_len=10**7))
