"""Whatever happens, and in whatever order: right tokens, no lost page, an end to everything.

A state machine adds, forks, aborts and fails requests and overlaps steps at will, under every
policy, chunk and cache size; the simulated engine checks what each row reads.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.scheduler import SchedulerConfig
from gnomon.errors import OverloadError, RequestError
from tests.unit.engine.simulated_engine import VOCAB, SimulatedEngine, make_request

MAX_IN_FLIGHT = 3

# Few tokens and shared beginnings, so that prefixes meet often.
prompts = st.builds(
    lambda head, tail: [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6][:head] + tail,
    st.integers(0, 12),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(6, 12),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=1),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
configs = st.builds(
    SchedulerConfig,
    max_model_len=st.integers(22, 28),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 40),
    max_prefill_chunk=st.sampled_from([0, 0, 1, 3, 7]),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_queue=st.sampled_from([3, 50]),
    enable_prefix_cache=st.booleans(),
    reserve=st.sampled_from([0.0, 0.01, 0.3]),
)
groups = st.sampled_from(
    [
        {"tokens": (8, 4)},  # just enough for the longest request
        {"tokens": (15, 2)},
        {"tokens": (28, 1)},
        {"tokens": (20, 4)},
        {"latent": (8, 4), "compressed": (40, 2)},
        {"latent": (30, 2), "compressed": (9, 4), "window": (28, 1)},
    ]
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs, groups=groups)
    def start(self, config: SchedulerConfig, groups: dict[str, tuple[int, int]]) -> None:
        self.engine = SimulatedEngine(config, groups)
        self.num_added = 0

    def try_add(self, request: EngineRequest) -> None:
        """Add it, or see it refused for the reason that there is."""
        engine, config = self.engine, self.engine.scheduler.config
        num_prompt = len(request.prompt_token_ids)
        longest = min(num_prompt + (request.params.max_tokens or 99), config.max_model_len)
        expected: tuple[type[Exception], str] | None = None
        if num_prompt >= config.max_model_len:
            expected = RequestError, "the context of this server holds"
        elif longest - 1 > engine.pool.num_spans * engine.pool.span_tokens:
            expected = RequestError, "but the cache has"
        elif engine.scheduler.num_waiting >= config.max_queue:  # above it after preemptions
            expected = OverloadError, "may wait"
        if expected is None:
            engine.add(request)
        else:
            with pytest.raises(expected[0], match=expected[1]):
                engine.add(request)

    def new_id(self) -> str:
        self.num_added += 1
        return f"r{self.num_added}"

    @rule(prompt=prompts, params=sampling, priority=st.integers(0, 2), salt=st.sampled_from("aab"))
    def add(self, prompt: list[int], params: SamplingParams, priority: int, salt: str) -> None:
        fields = {"priority": priority, "cache_salt": salt, "arrival_s": self.num_added % 3}
        self.try_add(make_request(self.new_id(), prompt, params=params, **fields))

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), priority=st.integers(0, 2))
    def fork(self, data: st.DataObject, priority: int) -> None:
        parent = self.engine.requests[data.draw(st.sampled_from(sorted(self.engine.requests)))]
        fields = {
            "fork_of": parent.request_id,
            "cache_salt": parent.cache_salt,
            "priority": priority,
        }
        prompt = list(parent.prompt_token_ids)
        self.try_add(make_request(self.new_id(), prompt, params=parent.params, **fields))

    @precondition(lambda self: len(self.engine.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def begin_step(self) -> None:
        self.engine.begin()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def end_step(self) -> None:
        self.engine.end()

    @rule(times=st.integers(1, 6))
    def whole_steps(self, times: int) -> None:
        for _ in range(times):
            self.engine.begin()
            while self.engine.in_flight:
                self.engine.end()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def lose_step(self) -> None:
        deltas = self.engine.lose()
        assert all(d.finish_reason == "error" and d.error == "lost" for d in deltas)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), is_fault=st.booleans())
    def end_early(self, data: st.DataObject, is_fault: bool) -> None:
        engine = self.engine
        request_id = data.draw(st.sampled_from(sorted(engine.requests)))
        if is_fault:
            delta = engine.scheduler.fail(request_id, "NaN")
        else:
            delta = engine.scheduler.abort(request_id)
        assert (delta is None) == (request_id in engine.endings)
        if delta is not None:
            assert delta.finish_reason == ("error" if is_fault else "abort")
            engine.record([delta])

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.finish_all()
        for request_id in engine.requests:
            if engine.endings[request_id][0] not in ("abort", "error"):
                engine.check_finished(request_id)
        engine.check_no_leak()
        stats = engine.scheduler.stats()
        assert sum(stats.finished.values()) == len(engine.requests)
        assert stats.prefix_hits <= stats.prefix_queries
        assert stats.generation_tokens == sum(map(len, engine.outputs.values()))


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@given(
    wishes=st.lists(st.tuples(prompts, sampling, st.integers(0, 2)), min_size=1, max_size=9),
    chunk=st.sampled_from([0, 1, 5]),
    spans=st.integers(8, 11),
    is_overlapped=st.booleans(),
)
@settings(max_examples=25)
def test_everything_completes_with_only_just_enough_pages(
    policy: str,
    enable_prefix_cache: bool,
    wishes: list[tuple[list[int], SamplingParams, int]],
    chunk: int,
    spans: int,
    is_overlapped: bool,
) -> None:
    config = SchedulerConfig(
        max_model_len=29,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_prefill_chunk=chunk,
        policy=policy,
        enable_prefix_cache=enable_prefix_cache,
    )
    engine = SimulatedEngine(config, {"tokens": (spans, 4)})
    for number, (prompt, params, priority) in enumerate(wishes):
        engine.add(make_request(str(number), prompt, params=params, priority=priority))
    while is_overlapped and engine.scheduler.has_work:
        if engine.begin().is_empty or len(engine.in_flight) == 2:
            engine.end()  # a step is always in flight when the next one is scheduled
    engine.finish_all()
    for request_id in engine.requests:
        engine.check_finished(request_id)
    engine.check_no_leak()
