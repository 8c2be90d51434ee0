"""Cases G of reference/bugs.md: exactness of top-k, ties, determinism, agreement of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnomon.attention.plan import Budget
from gnomon.attention.taps import RecordingTap
from gnomon.models.registry import build_model
from tests.laws.bugs.engines import bug_core, outputs, prompt, request
from tests.laws.bugs.op_cases import PROVIDERS, op_case, operators
from tests.laws.bugs.ranks import Ranks
from tests.laws.bugs.tiny import Bench, selections, token_list

SCALE = 0.3


def exact_sets(scores: Tensor, count: Tensor, k: int) -> list[list[int]]:
    """By a stable sort of each row's own columns: equal scores keep column order."""
    return [
        sorted(row[:n].sort(descending=True, stable=True).indices[:k].tolist())
        for row, n in zip(scores, count.tolist(), strict=True)
    ]


def assert_exact(provider: str, scores: Tensor, count: Tensor, k: int) -> None:
    hidden = torch.arange(scores.shape[1]) >= count[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    got = operators(provider).kernels["topk"](scores, count, k)
    for row, ids in enumerate(exact_sets(scores, count, k)):
        assert got.ids[row].tolist() == ids + [-1] * (k - len(ids))


def naive_bucket_topk(row: Tensor, k: int, capacity: int) -> set[int]:
    """A radix select by the upper 16 bits whose threshold bucket has a buffer of fixed size."""
    bucket = row.view(torch.int32) >> 16  # positive scores: bits ascend with the value
    order = bucket.sort(descending=True, stable=True).indices
    edge = int(bucket[order[k - 1]])
    above = (bucket > edge).nonzero()[:, 0].tolist()
    kept = (bucket == edge).nonzero()[:capacity, 0]  # first come, first kept
    best = kept[row[kept].sort(descending=True, stable=True).indices[: k - len(above)]]
    return {*above, *best.tolist()}


@pytest.mark.parametrize("k", [512, 2048])
def test_g1_thirty_thousand_scores_in_one_narrow_band(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = 1 + torch.rand(2, 30_000, generator=generator) * 2.0**-8
    count = torch.tensor([30_000, 29_000], dtype=torch.int32)
    exact = exact_sets(scores, count, k)
    assert naive_bucket_topk(scores[0], k, 4096) != set(exact[0])
    for provider in PROVIDERS:
        assert_exact(provider, scores, count, k)


def test_g2_equal_in_half_precision_distinct_in_single() -> None:
    """5,000 values of one fp16 bin: a bin's first 2,048 candidates are not its best ones."""
    scores = 1 + torch.randperm(5000, generator=torch.Generator().manual_seed(2))[None] * 2.0**-23
    assert len(set(scores.half()[0].tolist())) <= 2
    assert len(set(scores[0].tolist())) == 5000
    count = torch.tensor([5000], dtype=torch.int32)
    naive = naive_bucket_topk(scores[0], 2048, 2048)
    assert naive != set(exact_sets(scores, count, 2048)[0])
    for provider in PROVIDERS:
        assert_exact(provider, scores, count, 2048)


def test_g3_flat_and_peaked_rows_take_turns() -> None:
    """No scalar of one row leaks into the next; lengths around the usual pass boundaries."""
    lengths = [100, 8192, 70_000, 8193, 32_769, 0, 100]
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(len(lengths), 70_000, generator=generator)
    scores[::2] = 0.5  # flat
    scores[2, -5:] = 9.0
    assert_exact("torch", scores, torch.tensor(lengths, dtype=torch.int32), 2048)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_g4_a_plateau_of_exact_zeros_falls_to_the_lower_positions(provider: str) -> None:
    """Fewer than k keys pass the relu: 25 replays give one set, the lowest zeros."""
    k, kernels = 16, operators(provider, torch.float32).kernels
    generator = torch.Generator().manual_seed(4)
    keys = -torch.rand(200, 4, generator=generator)
    keys[[150, 170, 199]] *= -1
    q, weights = torch.rand(1, 2, 4, generator=generator), torch.ones(1, 2)
    count = torch.tensor([200], dtype=torch.int32)
    found = set()
    for _ in range(25):
        scores = kernels["index_scores"](q, weights, keys, count, 1.0)
        found.add(tuple(kernels["topk"](scores, count, k).ids[0].tolist()))
    assert found == {(*range(13), 150, 170, 199)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_mates", [1, 7, 31])
def test_g5_a_row_has_its_own_bits_in_any_company(num_mates: int, dtype: torch.dtype) -> None:
    case = op_case([1] * (num_mates + 1), [40 + 3 * i for i in range(num_mates + 1)], dtype=dtype)
    kernel = operators("torch", dtype).kernels["sparse_mla"]
    rows = case.geometry.rows
    width = int(rows.kv_len.max())
    ids = torch.arange(width).expand(rows.num_rows, -1)
    slots = case.geometry.tables["tokens"].slots(rows.request[:, None], ids)
    slots = slots.masked_fill(ids >= rows.kv_len[:, None], -1)
    parts = (case.q_latent.data, case.q_rope.data, slots, rows.kv_len)
    together = kernel(*parts[:2], case.pool, *parts[2:], SCALE)
    for row in (0, num_mates // 2, num_mates):
        own = [part[row : row + 1] for part in parts]
        alone = kernel(*own[:2], case.pool, *own[2:], SCALE)
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


def test_g6_one_output_over_all_batch_sizes() -> None:
    core = bug_core(max_num_seqs=24)
    found = set()
    for size in (1, 2, 3, 5, 8, 13, 20):
        core.reset_prefix_cache()
        mates = [request(f"m{i}", prompt(5 + 3 * i, 10 + i), 6) for i in range(size - 1)]
        found.add(tuple(outputs(core, [*mates, request("own", prompt(30), 12)])["own"]))
    assert len(found) == 1


@pytest.mark.parametrize("k", [8, 64, 512, 1000, 1024, 2048])
def test_g7_topk_is_a_runtime_value(k: int) -> None:
    """Widths that no constant of a kernel foresees; rows shorter, equal and longer than k."""
    lengths = [0, 1, k - 1, k, k + 1, 2 * k + 3]
    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(len(lengths), 2 * k + 3, generator=generator)
    for provider in PROVIDERS:
        assert_exact(provider, scores, torch.tensor(lengths, dtype=torch.int32), k)


def test_g8_ranks_agree_where_every_score_is_tied() -> None:
    """Index gates of 0: each rank, whatever its chunks, selects the lowest K positions."""
    bench = Bench()
    params = {
        name: torch.zeros_like(value) if name.endswith("weights_proj.weight") else value
        for name, value in bench.params.items()
    }
    bench.model = build_model(bench.config, params, 512)
    k, expected = bench.config.index_topk, {}
    tokens = token_list(41)
    for budget in (Budget(), Budget(score_bytes=4000)):
        tap = RecordingTap(wants_margin=False)
        bench.prefill([bench.request("r", tokens)], tap=tap, budget=budget)
        expected = selections(tap)
        for rows in expected.values():
            assert rows == [set(range(min(k, p + 1))) for p in range(41)]
    ranks = Ranks(bench, 2)
    ranks.step([(bench.request("r", tokens), 41)], budget=Budget(score_bytes=7000))
    assert ranks.selected() == expected
