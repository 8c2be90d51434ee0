"""A core without a model, for tests of processes: it counts tokens and starts in no time.

The first token of a prompt tells what the request is to do; the token ids sent out are 0, 1, 2 ...
The engine process imports this file by name, as "stand_in_core:build".
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from gnomon.engine.messages import EngineRequest, EngineStats, OutputDelta, ShadowStats
from gnomon.engine.wire import EngineInfo
from gnomon.errors import ConfigError, OverloadError

PLAIN, SLOW, RAISE, FULL, KILL, FREEZE = range(6)
STEP_S = 0.01  # of a step with a SLOW request
BAD_CONFIG_SEED, SILENT_EXIT_SEED = 1001, 1002

INFO = EngineInfo(
    model_label="stand-in",
    model_type="deepseek_v32",
    revision="",
    folder=None,
    tokenizer=None,
    vocab_size=4096,
    max_model_len=100_000,
    max_in_flight=8,
    drain_timeout_s=0.3,
    eos_token_ids=(),
    generation_defaults={},
    resolved={},
    operators=[],
    cache={},
)


class StandInCore:
    """Counts for every request until max_tokens."""

    info = INFO

    def __init__(self) -> None:
        self.alive: dict[str, tuple[EngineRequest, int]] = {}
        self.num_steps = 0
        self.shadow: ShadowStats | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.alive)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        if any(one.prompt_token_ids[0] == FULL for one in requests):
            raise OverloadError("the queue is full", 7.5)
        self.alive |= {one.request_id: (one, 0) for one in requests}

    def abort(self, request_ids: Sequence[str]) -> list[OutputDelta]:
        known = [name for name in request_ids if self.alive.pop(name, None)]
        return [OutputDelta(request_id=name, finish_reason="abort") for name in known]

    def abort_all(self) -> list[OutputDelta]:
        return self.abort(list(self.alive))

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.alive), num_steps=self.num_steps)

    def shadow_stats(self) -> ShadowStats | None:
        return self.shadow

    def reset_prefix_cache(self) -> None:
        self.num_steps = 0

    def step(self) -> list[OutputDelta]:
        self.num_steps += 1
        wishes = {one.prompt_token_ids[0] for one, _ in self.alive.values()}
        if RAISE in wishes:
            error = ValueError("a step raised on purpose")
            error.add_note("in step 41")
            raise error
        if KILL in wishes:
            os.kill(os.getpid(), signal.SIGKILL)
        if FREEZE in wishes:
            os.kill(os.getpid(), signal.SIGSTOP)
        if SLOW in wishes:
            time.sleep(STEP_S)
        return [self._advance(name) for name in list(self.alive)]

    def _advance(self, name: str) -> OutputDelta:
        request, count = self.alive[name]
        self.alive[name] = (request, count + 1)
        is_last = count + 1 == request.params.max_tokens
        if is_last:
            del self.alive[name]
        reason = "length" if is_last else None
        return OutputDelta(request_id=name, token_ids=[count], finish_reason=reason)


def build(config: Any, progress: Any, default_vocab_size: int | None = None) -> StandInCore:
    """Ready at once, after two reports of progress; or the failure that the seed asks for."""
    if config.seed == BAD_CONFIG_SEED:
        raise ConfigError("a flag is wrong")
    if config.seed == SILENT_EXIT_SEED:
        raise SystemExit(3)
    logging.getLogger("gnomon.stand_in").info("counts tokens")
    progress("weights", 1, 2)
    progress("weights", 2, 2)
    core = StandInCore()
    core.shadow = ShadowStats(steps=3, dropped=7) if config.shadow else None
    return core
