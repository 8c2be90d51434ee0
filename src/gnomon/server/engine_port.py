"""What the server needs of an engine: the Protocol that AsyncLLM fulfils, and tests fake.

Out: `EnginePort`, `DeltaStream`: the one place to change when that class changes.
Not here: an implementation (gnomon.frontend.async_llm).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from gnomon.engine.config import EngineConfig
from gnomon.engine.messages import EngineStats
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.wire import EngineInfo
from gnomon.frontend.outputs import Delta
from gnomon.text.language import Language


class DeltaStream(Protocol):
    """The output of one request, all its choices. Closing it early aborts them."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    async def arrived(self) -> Sequence[Delta]:
        """All that has come since the last look, one Delta per choice; nothing at the end."""
        ...

    async def aclose(self) -> None: ...


class EnginePort(Protocol):
    """An engine that runs. `start` raises what is wrong with a request before any output."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def language(self) -> Language: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def death(self) -> str | None: ...

    def stats(self) -> EngineStats: ...

    async def start(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        interval: int = 1,
    ) -> DeltaStream: ...

    def reset_prefix_cache(self) -> None: ...

    async def drain(self, deadline_s: float | None = None) -> None: ...
