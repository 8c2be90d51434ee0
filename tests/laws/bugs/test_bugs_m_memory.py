"""Cases M of reference/bugs.md: transients without a bound, memory that is not counted.

A Ledger (poison.py) notes the largest tensor that any call makes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gnomon.attention.geometry import build_geometry
from gnomon.attention.plan import Budget, plan_step
from gnomon.attention.providers.torch import attention as torch_attention
from gnomon.attention.routes import DensePolicy, RoutePolicy
from gnomon.cache.pages import PagePool
from gnomon.cache.tensors import CacheTensors
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.schedule_config import SchedulerConfig
from gnomon.engine.scheduler import Scheduler
from gnomon.errors import ConfigError
from gnomon.models.registry import cache_schema
from tests.laws.bugs.engines import bug_core
from tests.laws.bugs.op_cases import op_case, operators
from tests.laws.bugs.poison import Ledger
from tests.laws.bugs.tiny import Bench, t0_spec, tiny_model, token_list


def peak_of_chunk(bench: Bench, context: int, num_rows: int, **options: object) -> int:
    """Bytes of the largest tensor while ``num_rows`` tokens are computed behind a long context."""
    one = bench.request("r", token_list(context))
    one.done = context - num_rows  # what the cache holds does not matter here
    with Ledger() as ledger:
        bench.step([(one, num_rows)], **options)
    return ledger.peak


def long_bench(**fields: object) -> Bench:
    return Bench(fields=fields, page_size=64, num_pages=600, dtype=torch.float32)


def test_m1_the_peak_of_a_chunk_does_not_grow_with_the_context() -> None:
    """Chunk 64 at context 1k and 16k under one score budget: the same peak, within the budget."""
    budget = Budget(score_bytes=1 << 20)
    peaks = [peak_of_chunk(long_bench(), n, 64, budget=budget) for n in (1024, 16_384)]
    assert peaks[1] <= 1.1 * peaks[0]
    assert peaks[1] <= budget.score_bytes
    naive = 64 * 16_384 * 16 * 4  # rows x keys x heads
    assert naive > 60 * peaks[1]


@pytest.mark.parametrize("score_bytes", [200_000, 1 << 20])
def test_m2_the_candidate_stage_holds_no_second_copy(score_bytes: int) -> None:
    """Scores, the carried best and their join: none above the budget of scores."""
    bench = long_bench(topk=64)
    peak = peak_of_chunk(bench, 8192, 32, budget=Budget(score_bytes=score_bytes))
    floor = 32 * 64 * 40 * 4  # what attention gathers: rows x topk x entry
    assert peak <= max(score_bytes, floor)


def test_m3_the_head_axis_is_inside_the_budget() -> None:
    """64 index heads: per-head scores count, also where keys come page by page."""
    budget = Budget(score_bytes=1 << 20)
    for num_rows in (40, 1):
        bench = long_bench(index_heads=64)
        assert peak_of_chunk(bench, 12_000, num_rows, budget=budget) <= budget.score_bytes


def test_m4_a_mixed_step_has_a_capped_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 rows x 64 heads x 512 keys: 8 MiB where the untiled way takes 64; equal to the bit."""
    case = op_case([512], [1024], heads=64, rank=8, rope=8, dtype=torch.float32)
    rows, ids = case.geometry.rows, torch.arange(512).expand(512, -1)
    slots = case.geometry.tables["tokens"].slots(rows.request[:, None], ids)
    count = rows.kv_len.clamp_max(512)
    slots = slots.masked_fill(ids >= count[:, None], -1)
    kernel, peaks, outs = operators("torch", torch.float32).kernels["sparse_mla"], [], []
    for block in (torch_attention.GATHER_NUMBERS, 1 << 40):
        monkeypatch.setattr(torch_attention, "GATHER_NUMBERS", block)
        with Ledger() as ledger:
            outs.append(kernel(case.q_latent.data, case.q_rope.data, case.pool, slots, count, 0.3))
        peaks.append(ledger.peak)
    assert peaks[0] <= 8 << 20
    assert peaks[1] >= 64 << 20
    assert torch.equal(outs[0][0], outs[1][0])


def test_m5_a_cap_that_cannot_be_kept_is_refused_with_its_numbers() -> None:
    bench = long_bench()
    dims = bench.config.attention_dims()
    geometry = bench.geometry([(bench.request("r", token_list(300)), 300)])
    with pytest.raises(
        ConfigError, match=r"score budget of 64 bytes: one row and one key take \d+"
    ):
        plan_step(geometry, dims, budget=Budget(score_bytes=64), policy=RoutePolicy("never"))
    dense = Bench(fields={"topk": 512}, page_size=64, num_pages=60).config.attention_dims()
    with pytest.raises(ConfigError, match="context_rows is 63; at least a page, 64"):
        plan_step(geometry, dense, budget=Budget(context_rows=63))
    for score_bytes in (5000, 70_000, 1 << 22):
        plan = plan_step(geometry, dims, budget=Budget(score_bytes=score_bytes))
        assert plan.scratch_bytes <= score_bytes


@pytest.mark.parametrize("layout", ["auto", "bfloat16", "fp8"])
def test_m7_a_token_costs_its_latents_and_its_index_keys(layout: str) -> None:
    """Bytes of the pools = pages x page x (latents + index keys and scales), by hand."""
    core = bug_core("T2", kv_layout=layout, num_kv_pages=50)
    latent, index = {"auto": (160, 64), "bfloat16": (80, 32), "fp8": (32 + 4 + 16, 16 + 4)}[layout]
    by_hand = 50 * 4 * (8 * latent + 2 * index)  # 8 layers, 2 of them select
    cache = core._parts.cache
    assert core.info.cache["bytes"] == cache.num_bytes == by_hand
    assert sum(pool.storage.numel() for pool in cache.pools.values()) == by_hand


def numbered(count: int) -> Iterator[EngineRequest]:
    shared = list(range(40))
    for i in range(count):
        params = SamplingParams(max_tokens=9, temperature=0.0)
        yield EngineRequest(
            request_id=f"r{i}", prompt_token_ids=[*shared, 100 + i, i], params=params
        )


def test_m8_unequal_pools_queue_and_never_fail() -> None:
    """20 requests with a shared prefix; the second group has pages for two of them."""
    pages = PagePool({"latents": (200, 4), "index": (15, 8)})
    config = SchedulerConfig(max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64)
    scheduler = Scheduler(config, pages)
    for ask in numbered(20):
        scheduler.add(ask)
    reasons, most = [], 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert not step.is_empty
        most = max(most, scheduler.num_running)
        sampled = {item.request_id: [7] for item in step.items if item.needs_sample}
        reasons += [d.finish_reason for d in scheduler.commit(step, sampled) if d.finish_reason]
        scheduler.check_integrity()
    assert reasons == ["length"] * 20
    assert most < 16  # the smaller pool, not the seats, held them back
    assert pages.usage == 0.0


def test_m9_the_dense_route_is_bounded_in_context() -> None:
    """A continuation of 16 rows over 2,000 cached keys, gathered and expanded 64 at a time."""
    peaks = []
    for context_rows in (64, 4096):
        bench = Bench(fields={"topk": 4096}, page_size=64, num_pages=80, dtype=torch.float32)
        policy = RoutePolicy(DensePolicy.ALWAYS)
        budget = Budget(context_rows=context_rows)
        peaks.append(peak_of_chunk(bench, 2000, 16, policy=policy, budget=budget))
    assert peaks[0] <= 64 * 4 * 32 * 4 * 2  # keys x heads x (k and v) x fp32, and as much again
    assert peaks[1] > 10 * peaks[0]


def test_m9_the_reference_provider_is_chunked_too() -> None:
    bench = Bench(page_size=64, num_pages=80, dtype=torch.float32, provider="reference")
    assert peak_of_chunk(bench, 1500, 4, budget=Budget(score_bytes=100_000)) <= 100_000


def test_m10_constant_tables_do_not_grow_with_the_layers() -> None:
    """One rotary table a model: its bytes follow the positions, not layers times positions."""
    sizes = []
    for layers in (2, 6):
        _, params, model = tiny_model(t0_spec(layers=layers), torch.float32)
        held = {id(t): t for t in vars(model).values() if isinstance(t, torch.Tensor)}
        table = model.rope_table
        sizes.append(table.cos.numel() + table.sin.numel())
        assert sum(t.numel() for t in held.values()) <= sum(t.numel() for t in params.values())
        for layer in model.layers:
            parts = (layer.attention, layer.indexer, layer.feed_forward)
            shapes = [
                tuple(value.shape)
                for part in parts
                for name in getattr(type(part), "__slots__", ())
                if isinstance(value := getattr(part, name), torch.Tensor)
            ]
            assert shapes
            assert all(table.cos.shape[0] not in shape for shape in shapes)
    assert sizes[0] == sizes[1] == 2 * 20_000 * 4


def test_m7_the_schema_counts_what_the_tensors_take() -> None:
    bench = Bench("T2")
    layouts = [bench.pools[f"layers.0.{part}"].layout for part in ("latent", "index_key")]
    schema = cache_schema(bench.config, 4, *layouts)
    cache = CacheTensors(schema, {"tokens": 9})
    assert cache.num_bytes == 9 * schema.bytes_per_page("tokens")
    assert build_geometry([1], [1], {"tokens": [[1]]}, 4).rows.num_rows == 1
