"""Cases B of reference/bugs.md: sentinels, empty rows, scores that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import PageTable, build_geometry
from gnomon.attention.indices import KeySet, ListSegment, Space, owned_list, to_slots
from gnomon.attention.layouts import PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ownership import KeyOwnership
from gnomon.errors import GeometryError
from tests.laws.bugs.engines import VOCAB, bug_core, cold_outputs, prompt, request, run, tokens
from tests.laws.bugs.op_cases import PROVIDERS, OpCase, op_case, operators
from tests.laws.bugs.plain_model import plain_run
from tests.laws.bugs.poison import PoisonedMemory
from tests.laws.bugs.tiny import Bench, assert_same_rows, token_list

SCALE = 0.3


def slots_of(case: OpCase, ids: Tensor) -> Tensor:
    return case.geometry.tables["tokens"].slots(case.geometry.rows.request[:, None], ids)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0, -math.inf])
def test_b1_topk_of_nan_rows_gives_valid_ids(provider: str, share: float) -> None:
    """Rows with NaN, all NaN, all -inf (share -inf): ids unique, in range; the flag tells NaN."""
    k, length, topk = 8, 40, operators(provider).kernels["topk"]
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(6, length, generator=generator)
    if share == -math.inf:
        scores[:3] = -torch.inf
    else:
        bad = torch.rand(3, length, generator=generator) < share
        bad[:, 5] = True
        scores[:3] = scores[:3].masked_fill(bad, torch.nan)
    count = torch.tensor([length, 20, 3] * 2, dtype=torch.int32)
    hidden = torch.arange(length) >= count[:, None]
    got = topk(scores.masked_fill(hidden, -torch.inf), count, k)
    for row, length_of_row in enumerate(count.tolist()):
        num = int(got.count[row])
        ids = got.ids[row].tolist()
        assert num == min(k, length_of_row)
        assert sorted(set(ids[:num])) == ids[:num]
        assert all(0 <= i < length_of_row for i in ids[:num])
        assert ids[num:] == [-1] * (k - num)
    has_nan = share != -math.inf
    assert got.nan_rows.tolist()[:2] == [has_nan] * 2
    assert not any(got.nan_rows.tolist()[3:])


def test_b1_nan_fails_its_request_alone() -> None:
    """A request whose tokens embed to NaN ends with an error past topk; its mates go on."""
    core = bug_core()
    mates = [request(f"m{i}", prompt(9 + 4 * i, i), 6) for i in range(3)]
    expected = cold_outputs(core, mates)
    core._parts.runner._model.embedding[VOCAB - 1] = math.nan
    found = run(core, [*mates, request("bad", [7] * 20 + [VOCAB - 1] * 3 + [9] * 20, 6)])
    assert found["bad"][-1].finish_reason == "error"
    assert {name: tokens(found[name]) for name in expected} == expected
    assert core.stats().kv_usage == 0.0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_b2_lanes_after_the_count_are_not_read(provider: str) -> None:
    """65 rows; behind the count lie valid-looking slots of another request."""
    width = 16
    case = op_case([64, 1], [70, 50], rank=64, heads=8)
    generator = torch.Generator().manual_seed(4)
    count = torch.randint(0, width + 1, (65,), generator=generator, dtype=torch.int32)
    ids = torch.stack([torch.randperm(7, generator=generator).repeat(3)[:width] for _ in range(65)])
    count = count.clamp_max(7)
    inside = torch.arange(width) < count[:, None]
    clean = torch.where(inside, slots_of(case, ids), -1)
    foreign = slots_of(case, torch.arange(width).expand(65, -1)).flip(0)
    kernel = operators(provider).kernels["sparse_mla"]
    results = [
        kernel(case.q_latent.data, case.q_rope.data, case.pool, slots, count, SCALE)
        for slots in (clean, torch.where(inside, clean, foreign))
    ]
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    keys = {r: ids[r, : count[r]].tolist() for r in range(65)}
    assert torch.allclose(results[0][0], case.expected(keys, SCALE)[0], atol=1e-12)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_b3_sentinels_do_not_read_before_the_pool(provider: str) -> None:
    """An entry of inf lies just before the cache; lists of 0, 1 and k valid ids."""
    case = op_case([3], [24])
    layout, k = PlainLayout(torch.float64, 40), 8
    held = case.pool.storage
    buffer = torch.cat((held.new_zeros(1, held.shape[1]), held))
    buffer[0].view(torch.float64).fill_(torch.inf)
    pool = PagedPool(layout, buffer[1:], 4)
    ids = torch.full((3, k), -1)
    ids[1, :1], ids[2] = 5, torch.arange(k)
    count = torch.tensor([0, 1, k], dtype=torch.int32)
    kernel = operators(provider).kernels["sparse_mla"]
    out, lse = kernel(case.q_latent.data, case.q_rope.data, pool, slots_of(case, ids), count, SCALE)
    expected = case.expected({0: [], 1: [5], 2: list(range(k))}, SCALE)
    assert torch.allclose(out, expected[0], atol=1e-12)
    assert torch.allclose(lse, expected[1], atol=1e-12)
    assert not layout.gather(pool, torch.tensor([-1, -7])).any()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_b4_any_share_of_absent_ids(provider: str, size: int) -> None:
    """Ids absent at any place, 0 to 97 % of them: packed first, then attended."""
    case = op_case([6], [40])
    rows = case.geometry.rows
    seen = rows.kv_len.tolist()
    segment = ListSegment(
        "tokens",
        Space.POSITION,
        torch.stack([torch.where(torch.arange(40) < n, torch.arange(40), -1) for n in seen]),
        rows.kv_len,
    )
    ops, kept = operators(provider), {r: [] for r in range(6)}
    for rank in range(size):
        own = KeyOwnership(rank, size)
        mine = owned_list(segment, own)
        KeySet(rows, (mine,)).check()
        keys = {r: [p for p in range(seen[r]) if p % size == rank] for r in range(6)}
        out, lse = case.expected(keys, SCALE)
        table = case.geometry.tables["tokens"]
        got = ops.sparse_mla(
            case.q_latent, case.q_rope, case.pool, KeySet(rows, (mine,)), table, SCALE
        )
        assert torch.allclose(got.out.data, out, atol=1e-12)
        assert torch.allclose(got.lse.data, lse, atol=1e-12)
        kept = {r: kept[r] + ids for r, ids in keys.items()}
    assert all(len(ids) == seen[r] for r, ids in kept.items())


def test_b4_holes_in_a_list_are_refused() -> None:
    case = op_case([1], [9])
    ids = torch.tensor([[0, -1, 4, 5]])
    keys = KeySet(
        case.geometry.rows,
        (ListSegment("tokens", Space.POSITION, ids, torch.tensor([4], dtype=torch.int32)),),
    )
    with pytest.raises(GeometryError, match="a valid id is negative: row 0"):
        keys.check()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_b5_no_entry_is_complete_yet(provider: str) -> None:
    """One entry for four tokens: at lengths 1, 2, 3 every list is empty; then 1..5."""
    ops = operators(provider, torch.float32)
    pool = PlainLayout(torch.float32, 16).allocate(9, 2)
    pool.typed().fill_(torch.nan)
    pool.typed()[2:] = torch.randn(16, 16)
    generator = torch.Generator().manual_seed(0)
    for lengths in ([1, 2, 3] * 11, [1, 2, 3, 4, 5]):
        num = len(lengths)
        pages = torch.arange(num * 2, dtype=torch.int32).view(num, 2) % 8 + 1
        table = PageTable("compressed", pages, 2, 4)
        geometry = build_geometry([1] * num, lengths, {"compressed": table})
        geometry.check()
        count = table.num_entries(geometry.rows.kv_len)
        assert count.tolist() == [n // 4 for n in lengths]
        q = torch.randn(num, 4, 16, generator=generator)
        scores = ops.kernels["index_scores_paged"](q, q[:, :, 0], pool, pages[:, :1], count, 1.0)
        best = ops.kernels["topk"](scores, count, 2)
        assert best.count.tolist() == count.tolist()
        assert best.ids.tolist() == [[0, -1] if n >= 4 else [-1, -1] for n in lengths]
        assert not bool(best.nan_rows.any())
        slots = table.entry_slots(geometry.rows.request[:, None], best.ids)
        out, lse = ops.kernels["sparse_mla"](q[..., :12], q[..., 12:], pool, slots, best.count, 1.0)
        empty = count == 0
        assert not out[empty].any()
        assert bool((lse[empty] == -torch.inf).all())
        assert bool(out[~empty].isfinite().all())


def test_b7_memory_that_nobody_wrote_is_not_read() -> None:
    """A prompt of 70 in chunks of 16 with every uninitialised tensor full of poison."""
    clean = Bench()
    one = clean.request("r", token_list(70))
    expected = {}
    for n in (16, 16, 16, 16, 6):
        expected |= clean.step([(one, n)])
    for provider in PROVIDERS:
        bench = Bench(provider=provider)
        one = bench.request("r", token_list(70))
        got = {}
        with PoisonedMemory() as memory:
            for n in (16, 16, 16, 16, 6):
                got |= bench.step([(one, n)])
        assert memory.num_poisoned > 0 or provider == "reference"
        assert_same_rows(expected, got, 1e-10)


def test_b8_lists_wider_than_topk_take_their_width_from_the_buffer() -> None:
    """Width 19 (topk 16 and a tail of 3); ids past the table are no slot, never another's."""
    case = op_case([2], [28])
    rows, table = case.geometry.rows, case.geometry.tables["tokens"]
    ids = torch.arange(19).repeat(2, 1) + torch.tensor([[0], [9]])
    count = torch.full((2,), 19, dtype=torch.int32)
    keys = KeySet(rows, (ListSegment("tokens", Space.POSITION, ids, count),))
    keys.check()
    got = operators().sparse_mla(case.q_latent, case.q_rope, case.pool, keys, table, SCALE)
    expected = case.expected({0: ids[0].tolist(), 1: ids[1].tolist()}, SCALE)
    assert torch.allclose(got.out.data, expected[0], atol=1e-12)
    past = ListSegment("tokens", Space.POSITION, ids + 12, count)  # up to 39 of 28
    with pytest.raises(GeometryError, match="an id has no page in table 'tokens'"):
        to_slots(past, rows, table)
    slots = to_slots(past, rows, table, validate=False).ids
    assert bool((slots[ids + 12 >= 28] == -1).all())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_b9_empty_rows_between_full_ones(provider: str) -> None:
    """Lengths 0, 1 and k mixed: zero output, lse -inf, neighbours untouched."""
    case = op_case([1] * 9, [20] * 9)
    k, count = 8, torch.tensor([0, 1, 8] * 3, dtype=torch.int32)
    ids = torch.where(torch.arange(k) < count[:, None], torch.arange(k), -1)
    kernel = operators(provider).kernels["sparse_mla"]
    slots = slots_of(case, ids)
    out, lse = kernel(case.q_latent.data, case.q_rope.data, case.pool, slots, count, SCALE)
    expected = case.expected({r: range(int(count[r])) for r in range(9)}, SCALE)
    assert torch.allclose(out, expected[0], atol=1e-12)
    assert torch.equal(lse == -torch.inf, (count == 0)[:, None].expand(-1, 4))


@pytest.mark.parametrize("length", range(1, 8))
def test_b10_fewer_keys_than_topk(length: int) -> None:
    """Prompts of 1..7 under topk 8: exactly the dense model, one by one too."""
    bench, prompt_ids = Bench(), token_list(length, length)
    dense = plain_run(bench.config, bench.params, prompt_ids, is_dense=True)
    whole, single = bench.request("r", prompt_ids), bench.request("r", prompt_ids)
    got = bench.prefill([whole])
    assert torch.allclose(torch.stack(list(got.values())), dense.hidden, atol=1e-10)
    steps = {}
    for _ in range(length):
        steps |= bench.step([(single, 1)])
    assert_same_rows(got, steps)
