"""Cases I of reference/bugs.md: context parallelism, of work (prefill) and of keys (decode).

I1, the second motivating fault, is in tests/laws/test_motivating_faults_ranks.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import RowTensor, WriteSlots
from gnomon.attention.indices import KeySet, causal_list, owned_list, to_slots
from gnomon.attention.ops.values import IndexTransform
from gnomon.attention.ownership import KeyOwnership
from gnomon.attention.routes import DensePolicy, RoutePolicy
from gnomon.attention.spec.draw import rope_rows
from gnomon.attention.transforms import ShardStrategy
from gnomon.errors import GeometryError
from tests.laws.bugs.dcp import StripedOperators, merge_all
from tests.laws.bugs.op_cases import PROVIDERS, op_case, operators
from tests.laws.bugs.ranks import Ranks, assert_caches_equal
from tests.laws.bugs.tiny import Bench, Token, assert_same_rows, token_list

SCALE = 0.3


@pytest.mark.parametrize("strategy", list(ShardStrategy))
def test_i3_two_tokens_on_eight_ranks(strategy: ShardStrategy) -> None:
    """Six ranks have padding alone; ids, offsets and lengths of a rank have one row count."""
    bench = Bench()
    ranks = Ranks(bench, 8, strategy)
    tokens = token_list(2)
    expected = bench.prefill([bench.request("r", tokens)])
    assert_same_rows(expected, ranks.step([(bench.request("r", tokens), 2)]))
    assert sorted(len(output.rows) for output in ranks.outputs) == [0] * 6 + [1, 1]
    assert {output.geometry.rows.num_rows for output in ranks.outputs} == {1}
    assert {log[0].shape[0] for log in ranks.logs} == {1}


@pytest.mark.parametrize("strategy", list(ShardStrategy))
@pytest.mark.parametrize("length", [13, 14, 15, 16, 17, 31])
@pytest.mark.parametrize("dense", [DensePolicy.NEVER, DensePolicy.ALWAYS])
def test_i4_lengths_that_do_not_divide(
    length: int, strategy: ShardStrategy, dense: DensePolicy
) -> None:
    """Both split modes; a short prompt among them, sparse like all, or dense on every rank."""
    bench = Bench()
    ranks = Ranks(bench, 4, strategy)
    lengths = {"a": length, "b": 29 - length % 5, "c": 7}
    alone = [bench.request(name, token_list(n, n)) for name, n in lengths.items()]
    expected = bench.prefill(alone)
    for one in alone:
        one.done = 0
    work = [(one, len(one.tokens)) for one in alone]
    assert_same_rows(dict(sorted(expected.items())), ranks.step(work, policy=RoutePolicy(dense)))
    for cache in ranks.caches:
        assert_caches_equal(bench.pools, cache)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_i5_a_rank_that_owns_no_token_of_the_step(provider: str) -> None:
    """Every slot is -1: queries are prepared all the same, caches stay as they are."""
    ops, positions = operators(provider), [3, 9]
    rows = rope_rows(positions, 8, is_interleaved=True)
    axis = rows.axis
    case = op_case([1], [8])
    generator = torch.Generator().manual_seed(0)
    q = RowTensor(axis, torch.randn(2, 4, 40, generator=generator, dtype=torch.float64))
    k = RowTensor(axis, torch.randn(2, 40, generator=generator, dtype=torch.float64))
    ones = torch.ones(40, dtype=torch.float64)
    before = case.pool.storage.clone()
    queries = []
    for slots in (torch.tensor([-1, -1]), torch.tensor([4, 5])):
        writes = WriteSlots(axis, slots)
        transform = IndexTransform(ones, ones)
        queries.append(ops.index_prepare(q, k, transform, (rows, rows), case.pool, writes).data)
        if int(slots[0]) < 0:
            ops.latent_write(k, ones[:32], 1e-6, rows, case.pool, writes)
            assert torch.equal(case.pool.storage, before)
    assert torch.equal(queries[0], queries[1])
    assert not torch.equal(queries[0], q.data)
    assert not torch.equal(case.pool.storage, before)


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 4), (3, 1), (4, 2)])
def test_i6_each_rank_filters_the_ids_that_it_owns(size: int, interleave: int) -> None:
    """The union over ranks is the global set; a rank's id never goes through a foreign table."""
    case = op_case([4, 2], [30, 11])
    rows, table = case.geometry.rows, case.geometry.tables["tokens"]
    whole = causal_list(rows, "tokens", 30)
    union: list[list[int]] = [[] for _ in range(rows.num_rows)]
    for rank in range(size):
        own = KeyOwnership(rank, size, interleave)
        mine = owned_list(whole, own)
        KeySet(rows, (mine,)).check()
        for row, (ids, count) in enumerate(
            zip(mine.ids.tolist(), mine.count.tolist(), strict=True)
        ):
            assert count == own.num_owned(int(rows.kv_len[row]))
            assert all(p // interleave % size == rank for p in ids[:count])
            union[row] += ids[:count]
    assert [sorted(ids) for ids in union] == [list(range(n)) for n in rows.kv_len.tolist()]
    # Global ids through a rank's own numbering, as the report's release did: other entries' slots.
    positions, first = torch.arange(30), KeyOwnership(0, size, interleave)
    naive = table.slots(torch.zeros(30), first.local_position(positions))
    assert not torch.equal(naive, table.slots(torch.zeros(30), positions))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("parts", [2, 3, 5, 9])
def test_i7_lse_is_natural(provider: str, parts: int) -> None:
    """One row's keys in n parts, joined = unsplit; lse in base 2 gives something else."""
    ops, case = operators(provider), op_case([1], [27])
    rows = case.geometry.rows
    partials: list[tuple[Tensor, Tensor]] = []
    for rank in range(parts):
        mine = owned_list(causal_list(rows, "tokens", 27), KeyOwnership(rank, parts))
        table = case.geometry.tables["tokens"]
        got = ops.sparse_mla(
            case.q_latent, case.q_rope, case.pool, KeySet(rows, (mine,)), table, SCALE
        )
        partials.append((got.out.data, got.lse.data))
    out, lse = case.expected(case.causal(), SCALE)
    merged = merge_all(ops, partials)
    assert torch.allclose(merged[0], out, atol=1e-12)
    assert torch.allclose(merged[1], lse, atol=1e-12)
    naive = merge_all(ops, [(part, base_e / math.log(2)) for part, base_e in partials])
    assert not torch.allclose(naive[0], out, atol=1e-4)


@pytest.fixture(scope="module")
def long_rows() -> dict[int, dict[Token, Tensor]]:
    """Hidden rows of prompts on one rank."""
    found = {}
    for length in (100, 129, 300):
        bench = Bench()
        found[length] = bench.prefill([bench.request("r", token_list(length, length))])
    return found


def striped(length: int, size: int, interleave: int, chunk: int) -> dict[Token, Tensor]:
    """The same prompt with latents striped over ranks, in chunks."""
    bench = Bench()
    ops = bench.ops = StripedOperators(bench, size, interleave)
    one, got = bench.request("r", token_list(length, length)), dict[Token, Tensor]()
    while one.done < length:
        work = [(one, min(chunk, length - one.done))]
        geometry = ops.geometry = bench.geometry(work)
        got |= bench.step(work, change=lambda _, made=geometry: made)
    return got


@pytest.mark.parametrize(("length", "size"), [(100, 2), (129, 4), (300, 2), (300, 4)])
def test_i8_prompts_past_128_over_striped_keys(
    long_rows: dict[int, dict[Token, Tensor]], length: int, size: int
) -> None:
    assert_same_rows(long_rows[length], striped(length, size, 1, 64))


def test_i9_perplexity_does_not_drift_over_ranks(long_rows: dict[int, dict[Token, Tensor]]) -> None:
    """The mean negative log-likelihood of 300 tokens, one rank and four, chunk by chunk."""
    tokens, bench, found = torch.tensor(token_list(300, 300)), Bench(), []
    for rows in (long_rows[300], striped(300, 4, 4, 50)):
        logits = bench.logits(rows)[:-1]
        found.append(float(torch.nn.functional.cross_entropy(logits, tokens[1:])))
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_i6_ids_of_another_space_are_refused() -> None:
    case = op_case([2], [9])
    rows = case.geometry.rows
    slots = to_slots(causal_list(rows, "tokens", 9), rows, case.geometry.tables["tokens"])
    with pytest.raises(GeometryError, match="ownership is by position"):
        owned_list(slots, KeyOwnership(0, 2))
