"""An engine without a model: it keeps the promises of the scheduler and the cache honest.

The "cache" is a dict from (group, page, offset) to what a model's entry depends on: the position,
the salt and all tokens up to it. A step writes its rows there and then looks up, through the page
ids that the schedule names, every position that attention would read. The next token is a function
of that history alone, so that what a request must produce is known from a plain loop without any
scheduler (`expected_output`). Steps run in order, as late as the caller likes.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Any

from gnomon.cache.pages import PagePool
from gnomon.engine.messages import EngineRequest, OutputDelta
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.schedule_step import ScheduledRequest, StepSchedule
from gnomon.engine.scheduler import Scheduler, SchedulerConfig

VOCAB = 11
EOS = 7
ONE_GROUP = {"tokens": (9, 4)}

Groups = dict[str, tuple[int, int]]  # name -> (pages with the null page, tokens per page)


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    params: SamplingParams | None = None,
    **fields: Any,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params or SamplingParams(max_tokens=4),
        eos_token_ids=(EOS,),
        **fields,
    )


def fingerprints(tokens: list[int], salt: str) -> list[bytes]:
    """For each position what its cache entry depends on, shortened to 8 bytes."""
    state, found = blake2b(salt.encode(), digest_size=8), []
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        found.append(state.digest())
    return found


def next_token(tokens: list[int], salt: str) -> int:
    return fingerprints(tokens, salt)[-1][0] % VOCAB


def expected_output(request: EngineRequest, max_model_len: int) -> tuple[list[int], str, object]:
    """(output ids, finish reason, stop reason) of a request alone, by the definition."""
    params, tokens, output = request.params, list(request.prompt_token_ids), []
    while True:
        token = next_token(tokens, request.cache_salt)
        tokens.append(token)
        output.append(token)
        if len(output) > params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return output, "stop", None
            if token in params.stop_token_ids:
                return output, "stop", token
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length", None


class SimulatedEngine:
    """A scheduler, a pool, the simulated cache, and what has come out of them so far."""

    def __init__(self, config: SchedulerConfig, groups: Groups = ONE_GROUP) -> None:
        self.pool = PagePool(groups, namespace="simulated")
        self.page_sizes = {name: size for name, (_, size) in groups.items()}
        self.scheduler = Scheduler(config, self.pool)
        self.in_flight: deque[StepSchedule] = deque()
        self.entries: dict[tuple[str, int, int], tuple[int, bytes]] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.endings: dict[str, tuple[str, object]] = {}
        self.num_cached: dict[str, int] = {}
        self.num_rows = 0

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []

    # ------------------------------------------------------------ steps

    def begin(self) -> StepSchedule:
        """Schedule a step; its rows must not touch pages that other running steps name."""
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert step.groups == tuple(self.page_sizes)
        assert step.num_tokens == sum(item.num_new_tokens for item in step.items)
        assert step.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len({item.request_id for item in step.items}) == len(step.items)
        for item in step.items:
            written = set(self.slots(item, item.num_computed)) & self.named_by_others(item)
            assert not written, f"{item.request_id} writes {written}, named by a step in flight"
        if not step.is_empty:
            self.in_flight.append(step)
        return step

    def end(self) -> list[OutputDelta]:
        """Run the oldest step and commit it."""
        step = self.in_flight.popleft()
        tokens = [(item, self.run(item)) for item in step.items]
        sampled = {item.request_id: [token] for item, token in tokens if item.needs_sample}
        return self.record(self.scheduler.commit(step, sampled))

    def lose(self) -> list[OutputDelta]:
        """The oldest step cannot be run: its requests end, others must not notice."""
        return self.record(self.scheduler.fail_step(self.in_flight.popleft(), "lost"))

    def step(self) -> list[OutputDelta]:
        self.begin()
        return self.end() if self.in_flight else []

    def finish_all(self, max_steps: int = 3000) -> None:
        while self.in_flight:
            self.end()
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def record(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        for delta in deltas:
            request_id = delta.request_id
            assert request_id not in self.endings, "a delta after the last one"
            self.outputs[request_id] += delta.token_ids
            if delta.token_ids:
                self.num_cached.setdefault(request_id, delta.num_cached_tokens)
                assert self.num_cached[request_id] == delta.num_cached_tokens
                assert delta.num_cached_tokens < delta.num_prompt_tokens
            assert delta.num_prompt_tokens == len(self.requests[request_id].prompt_token_ids)
            if delta.finish_reason is not None:
                self.endings[request_id] = (delta.finish_reason, delta.stop_reason)
        self.scheduler.check_integrity()
        return deltas

    # ------------------------------------------------------------ the model's part

    def run(self, item: ScheduledRequest) -> int:
        """Write an item's rows, look at all it attends, and give its next token."""
        tokens, salt = item.tokens[: item.kv_len], item.request.cache_salt
        known = self.requests[item.request_id].prompt_token_ids + self.outputs[item.request_id]
        assert tokens == known[: item.kv_len]
        assert item.token_ids == tokens[item.num_computed :]
        assert item.num_new_tokens >= 1
        self.num_rows += item.num_new_tokens
        contents = list(enumerate(fingerprints(tokens, salt)))
        for slots in self.slots_by_group(item):
            for position in range(item.num_computed, item.kv_len):
                self.entries[slots[position]] = contents[position]
            found = [self.entries.get(slot) for slot in slots]
            is_alive = item.request_id not in self.endings  # else nobody sees what comes out
            assert found == contents or not is_alive, f"{item.request_id} reads not its own past"
        return next_token(tokens, salt)

    def slots_by_group(self, item: ScheduledRequest) -> list[list[tuple[str, int, int]]]:
        """Per group, where each position of the item lies. No page is the null page."""
        found = []
        for pages, (name, size) in zip(item.pages, self.page_sizes.items(), strict=True):
            assert (pages > 0).all()
            slots = [(name, int(pages[p // size]), p % size) for p in range(item.kv_len)]
            assert len(set(slots)) == len(slots)
            found.append(slots)
        return found

    def slots(self, item: ScheduledRequest, start: int) -> list[tuple[str, int]]:
        """The pages that hold positions from `start` on."""
        return [slot[:2] for slots in self.slots_by_group(item) for slot in slots[start:]]

    def named_by_others(self, item: ScheduledRequest) -> set[tuple[str, int]]:
        return {
            page
            for step in self.in_flight
            for other in step.items
            if other.request is not item.request
            for page in self.slots(other, 0)
        }

    # ------------------------------------------------------------ what must hold at the end

    def check_finished(self, request_id: str) -> None:
        """A request that was left alone gave what it gives when nothing else runs."""
        request = self.requests[request_id]
        output, reason, stop = expected_output(request, self.scheduler.config.max_model_len)
        assert self.outputs[request_id] == output
        assert self.endings[request_id] == (reason, stop)
        if request.params.prompt_logprobs is not None:
            assert self.num_cached[request_id] == 0  # every prompt row had to be computed

    def check_no_leak(self) -> None:
        """Nobody runs, so every page is free or evictable."""
        assert not self.scheduler.has_work
        self.scheduler.check_integrity()
        assert self.pool.num_available == self.pool.num_spans
        self.pool.evict_all()
        assert len(self.pool.index) == 0
        self.pool.check_integrity()


# ---------------------------------------------------------------- for tests of single rules

LONG = SamplingParams(max_tokens=16, ignore_eos=True)


def small_engine(num_pages: int = 65, **fields: Any) -> SimulatedEngine:
    """Steps of 16 rows, 4 seats, pages of 4 tokens, no prefix cache, no reserve."""
    limits = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, "reserve": 0.0}
    config = SchedulerConfig(**{**limits, "enable_prefix_cache": False, **fields})
    return SimulatedEngine(config, {"tokens": (num_pages, 4)})


def add(engine: SimulatedEngine, name: str, num_prompt: int = 4, **fields: Any) -> EngineRequest:
    """A request of so many equal tokens, other ones for each first letter of the name."""
    params = fields.pop("params", LONG)
    request = make_request(name, [ord(name[0])] * num_prompt, params=params, **fields)
    engine.add(request)
    return request


def rows(step: StepSchedule) -> dict[str, int]:
    return {item.request_id: item.num_new_tokens for item in step.items}


def next_rows(engine: SimulatedEngine) -> dict[str, int]:
    """Rows per request of the next step, which is then run."""
    step = engine.begin()
    if not step.is_empty:
        engine.end()
    return rows(step)
