"""An engine without a model, for tests of the server alone.

In:  what AsyncLLM takes. Token t of choice c is the t-th token of `sentence` behind the prompt,
     beginning at token c, so that every answer is known.
Out: `FakeEngine`, an EnginePort. A test can hold it back (`gate`), break a request (`fails_at`),
     kill it (`death`), and ask what was started and closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gnomon.engine.config import EngineConfig
from gnomon.engine.messages import EngineRequest, EngineStats, TokenLogprobs
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.wire import EngineInfo
from gnomon.errors import EngineDeadError, OverloadError
from gnomon.frontend.outputs import Delta
from gnomon.text.language import open_language

SENTENCE = "the shadow of the pin tells the hour to those who look"


class FakeEngine:
    """Answers with the words of a sentence."""

    def __init__(self, max_model_len: int = 256, max_in_flight: int = 64, **flags: Any) -> None:
        self.language = open_language("deepseek_v32")
        self.config = EngineConfig.of(max_model_len=max_model_len, **flags)
        self.sentence = self.language.tokenizer.encode_plain(SENTENCE)
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails_at: int | None = None
        self.death: str | None = None
        self.open: set[str] = set()
        self.started: list[tuple[str, SamplingParams]] = []
        self.info = EngineInfo(
            model_label="fake",
            model_type="deepseek_v32",
            revision="none",
            folder=None,
            tokenizer=None,
            vocab_size=self.language.tokenizer.vocab_size,
            max_model_len=max_model_len,
            max_in_flight=max_in_flight,
            drain_timeout_s=1.0,
            eos_token_ids=(),
            generation_defaults={},
            resolved={"max_model_len": (max_model_len, "flag", "")},
            operators=[("topk", "torch", "first in rank", "")],
            cache={"bytes": 0},
        )

    @property
    def is_healthy(self) -> bool:
        return self.death is None

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.open))

    async def start(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        interval: int = 1,
    ) -> FakeStream:
        if self.death is not None:
            raise EngineDeadError(self.death)
        if len(self.open) + params.n > self.info.max_in_flight:
            raise OverloadError("the queue is full", 1.2)
        request = EngineRequest(
            request_id=request_id, prompt_token_ids=list(prompt_token_ids), params=params
        )
        request.validate(self.info.vocab_size, self.info.max_model_len)
        self.open.add(request_id)
        self.started.append((request_id, params))
        return FakeStream(self, request)

    def reset_prefix_cache(self) -> None:
        self.started.clear()

    async def drain(self, deadline_s: float | None = None) -> None:
        while self.open:
            await asyncio.sleep(0.01)


class FakeStream:
    """One request's deltas, a token at a time, the choices in turn."""

    def __init__(self, engine: FakeEngine, request: EngineRequest) -> None:
        self._engine = engine
        self._request = request
        self._deltas = self._make()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._deltas)

    async def arrived(self) -> list[Delta]:
        """The next delta; none at the end."""
        delta = await anext(self._deltas, None)
        return [] if delta is None else [delta]

    async def aclose(self) -> None:
        await self._deltas.aclose()
        self._engine.open.discard(self._request.request_id)

    async def _make(self) -> Any:
        engine, params = self._engine, self._request.params
        num_tokens = params.max_tokens or 8
        for place in range(num_tokens):
            await engine.gate.wait()
            if engine.death is not None:
                raise EngineDeadError(engine.death)
            for choice in range(params.n):
                yield self._delta(place, choice, place == num_tokens - 1)
        engine.open.discard(self._request.request_id)

    def _delta(self, place: int, choice: int, is_last: bool) -> Delta:
        engine, params = self._engine, self._request.params
        token = engine.sentence[(place + choice) % len(engine.sentence)]
        has_failed = engine.fails_at == place
        scores = None
        if params.logprobs is not None:
            best = [(token, -0.5), (0, float("-inf"))][: params.logprobs]
            scores = (TokenLogprobs(token, -0.5, 1, best),)
        prompt_scores = None
        if params.prompt_logprobs is not None and place == 0 and choice == 0:
            ids = self._request.prompt_token_ids
            prompt_scores = (None, *(TokenLogprobs(index, -1.0, 2, []) for index in ids[1:]))
        return Delta(
            request_id=self._request.request_id,
            index=choice,
            text=engine.language.tokenizer.decode([token]),
            token_ids=(token,),
            logprobs=scores,
            finish_reason="error" if has_failed else "length" if is_last else None,
            error="layer 3 made NaN" if has_failed else None,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=1,
            prompt_logprobs=prompt_scores,
        )
