"""The third motivating fault: running decodes and a short prompt with cached context in one step.

Two decodes stay sparse while the prompt goes dense. A naive engine hands the converter the request
ids of all rows beside the index rows of the decodes alone, and reads packed 656-byte entries as
flat fp8. First that pipeline writes past its buffer and returns wrong numbers; then gnomon's sparse
subset carries exactly its own rows, the dense route reads context through the layout, also from
the middle of a request and from stripes over ranks, and equals the all-sparse step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import RowTensor
from gnomon.attention.indices import KeySet, causal_list, owned_list, to_slots
from gnomon.attention.layouts import LatentDims, choose_layout
from gnomon.attention.plan import Budget, plan_step
from gnomon.attention.routes import DensePolicy, Route, RoutePolicy
from gnomon.attention.transforms import pad_rows, select
from gnomon.errors import GeometryError, LayoutError
from tests.laws.bugs.dcp import StripedOperators, merge_all, stripe
from tests.laws.bugs.op_cases import op_case, operators, watched
from tests.laws.bugs.tiny import NEVER, Bench, Token, assert_same_rows, padded_to, token_list

ALWAYS = RoutePolicy(DensePolicy.ALWAYS)
PACKED = choose_layout("fp8_ds_mla", LatentDims(512, 64), torch.float64)
SCALE = 0.05
WIDE = {"layers": 2, "kv_rank": 512, "rope_dim": 64, "index_dim": 128, "topk": 32}


# ------------------------------------------------------------------ the naive pipeline


def naive_convert(request_ids: list[int], ids: list[list[int]], pages: Tensor, out: Tensor) -> None:
    """Position -> slot: the grid follows the request ids, the output the index rows."""
    width = len(ids[0])
    for row, request in enumerate(request_ids):
        for column in range(width):
            position = ids[row][column] if row < len(ids) else 0  # whatever lies there
            slot = int(pages[request, position // 4]) * 4 + position % 4
            out[row * width + column] = slot


def naive_flat_fp8(storage: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """576 numbers of one scale: how an entry of the flat fp8 format is read."""
    rows = storage.view(-1, storage.shape[1] // page_size)[slots]
    return rows[:, :576].contiguous().view(torch.float8_e4m3fn).double()


def test_naive_converter_writes_past_its_output() -> None:
    """22 request ids (2 decodes, 20 prompt rows), 2 index rows: 20 rows land behind the buffer."""
    case = op_case([1, 1, 20], [9, 12, 24])
    width, redzone = 4, torch.full((2 * 4 + 80,), -7)
    request_ids = [0, 1] + [2] * 20
    naive_convert(request_ids, [[0, 1, 2, 3]] * 2, case.geometry.tables["tokens"].pages, redzone)
    assert int((redzone[2 * width :] != -7).sum()) == 20 * width


def test_naive_flat_read_of_packed_entries_is_wrong_in_silence() -> None:
    case = op_case([2], [8], rank=512, rope=64, layout=PACKED)
    slots = case.geometry.tables["tokens"].slots(torch.zeros(8), torch.arange(8))
    wrong = naive_flat_fp8(case.pool.storage, slots, 4)
    assert wrong.shape == case.stored[0].shape
    assert not torch.allclose(wrong.nan_to_num(), case.stored[0], rtol=0.2, atol=0.2)


def test_naive_chunk_that_forgets_where_it_starts() -> None:
    """A context chunk from the middle of a request, read from the request's first page."""
    case = op_case([2], [24], rank=512, rope=64, layout=PACKED)
    pages = case.geometry.tables["tokens"].pages[0]
    wrong = case.pool.layout.gather_range(case.pool, pages, 0, 8)
    assert not torch.allclose(wrong.double(), case.stored[0][10:18])
    right = case.pool.layout.gather_range(case.pool, pages, 10, 8)
    assert torch.equal(right.double(), case.stored[0][10:18])


# ------------------------------------------------------------------ gnomon: refusals


def test_f1_lists_of_a_subset_do_not_take_all_rows() -> None:
    """Index rows of the decodes, rows of the whole step: refused where they meet."""
    case = op_case([1, 1, 20], [9, 12, 24])
    decodes = select(case.geometry, [0, 1])
    lists = causal_list(decodes.rows, "tokens", 12)
    table = case.geometry.tables["tokens"]
    with pytest.raises(GeometryError, match="2 rows of ids, row axis 'step' has 22"):
        to_slots(lists, case.geometry.rows, table)
    keys = KeySet(decodes.rows, (lists,))
    with pytest.raises(GeometryError, match="select 2 of 22"):
        operators().sparse_mla(case.q_latent, case.q_rope, case.pool, keys, table, SCALE)
    assert to_slots(lists, decodes.rows, table).ids.shape == (2, 12)


def test_f1_packed_bytes_are_not_read_as_another_format() -> None:
    case = op_case([2], [8], rank=512, rope=64, layout=PACKED)
    flat = choose_layout("bfloat16", LatentDims(512, 64), torch.float64)
    with pytest.raises(LayoutError, match="pool holds fp8_ds_mla_656"):
        flat.gather(case.pool, torch.tensor([4]))
    with pytest.raises(LayoutError, match="packs its bytes"):
        case.pool.typed_pages()


# ------------------------------------------------------------------ gnomon: equal results


class Mixed:
    """2 decodes over 70 cached tokens, and 12 new tokens over 16 cached ones."""

    def __init__(self, kv_layout: str = "fp8_ds_mla", **fields: Any) -> None:
        self.bench = Bench(fields=WIDE | fields, page_size=8, num_pages=48, kv_layout=kv_layout)
        self.requests = [
            self.bench.request(name, token_list(n, n))
            for name, n in (("a", 70), ("b", 71), ("p", 28))
        ]
        self.cached = (69, 70, 16)

    def begin(self) -> None:
        """Compute what the step finds in the cache, all sparse."""
        if isinstance(self.bench.ops, StripedOperators):
            self.bench.ops.geometry = self.bench.geometry(
                list(zip(self.requests, self.cached, strict=True))
            )
        self.bench.step(list(zip(self.requests, self.cached, strict=True)), policy=NEVER)

    def mixed_step(self, **options: Any) -> dict[Token, Tensor]:
        work = list(zip(self.requests, (1, 1, 12), strict=True))
        if isinstance(self.bench.ops, StripedOperators):
            self.bench.ops.geometry = self.bench.geometry(work)
        return self.bench.step(work, **options)


@pytest.fixture(scope="module", params=["fp8_ds_mla", "bfloat16"])
def expected(request: pytest.FixtureRequest) -> tuple[str, dict[Token, Tensor]]:
    """The step with every row sparse, by cache format."""
    mixed = Mixed(request.param)
    mixed.begin()
    return request.param, mixed.mixed_step(policy=NEVER)


@pytest.mark.parametrize("context_rows", [8192, 24, 8], ids=["whole", "three pages", "a page"])
@pytest.mark.parametrize("num_rows", [14, 40])
def test_f1_mixed_step_equals_the_all_sparse_step(
    expected: tuple[str, dict[Token, Tensor]], context_rows: int, num_rows: int
) -> None:
    """Context in one piece, or in chunks that start mid-request; padded and not."""
    mixed = Mixed(expected[0])
    mixed.begin()
    rows: dict[str, set[tuple[int, ...]]] = {"sparse_mla": set(), "dense_mha": set()}

    def watch(name: str, args: tuple[Any, ...]) -> None:
        if name == "sparse_mla":
            rows[name].add((len(args[0]), len(args[1]), len(args[3]), len(args[4])))
        elif name == "dense_mha":
            rows[name].add((len(args[0]), len(args[3])))

    mixed.bench.ops = watched(mixed.bench.ops, watch)
    budget = Budget(context_rows=context_rows)
    got = mixed.mixed_step(policy=ALWAYS, budget=budget, change=padded_to(num_rows))
    assert_same_rows(expected[1], got)
    assert rows["sparse_mla"] == {(2, 2, 2, 2)}
    assert max(rows["dense_mha"]) == (12, 12)
    assert all(query == visible for query, visible in rows["dense_mha"])


def test_f1_plan_of_the_mixed_step() -> None:
    """The sparse subset holds the decodes alone, with an axis of its own; all rows write."""
    mixed = Mixed()
    mixed.begin()
    geometry = pad_rows(
        mixed.bench.geometry(list(zip(mixed.requests, (1, 1, 12), strict=True))), 40
    )
    plan = plan_step(geometry, mixed.bench.config.attention_dims(), policy=ALWAYS)
    assert plan.routes == (Route.SPARSE, Route.SPARSE, Route.DENSE)
    assert plan.sparse is not None
    assert plan.dense is not None
    assert plan.sparse.axis.request.tolist() == [0, 1]
    assert plan.dense.axis.position.tolist() == list(range(16, 28))
    assert int((geometry.writes["tokens"].slots >= 0).sum()) == 14
    assert (
        plan.graph_key is None
    )  # its shapes hang on host lengths: never replayed for another step
    decodes = mixed.bench.geometry([(one, 1) for one in mixed.requests])
    assert plan_step(decodes, mixed.bench.config.attention_dims()).graph_key is not None


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 8), (4, 5)])
def test_f1_mixed_step_under_decode_context_parallelism(
    expected: tuple[str, dict[Token, Tensor]], size: int, interleave: int
) -> None:
    """Latents striped over ranks, both routes, through the whole model."""
    mixed = Mixed(expected[0])
    mixed.bench.ops = StripedOperators(mixed.bench, size, interleave)
    mixed.begin()
    got = mixed.mixed_step(policy=ALWAYS, budget=Budget(context_rows=16))
    assert_same_rows(expected[1], got)


@pytest.mark.parametrize("rope", [64, 0], ids=["rope", "nope"])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (4, 4)])
def test_f1_ranks_merge_both_routes_from_packed_stripes(
    size: int, interleave: int, rope: int
) -> None:
    """Operators alone: each rank gathers and attends its own 656-byte entries, then merges."""
    ops, heads, rank = operators(), 2, 512
    layout = choose_layout("fp8_ds_mla", LatentDims(rank, rope), torch.float64)
    case = op_case([1, 6], [37, 30], rank=rank, rope=rope, heads=heads, layout=layout)
    geometry, table = case.geometry, case.geometry.tables["tokens"]
    keys = KeySet(geometry.rows, (causal_list(geometry.rows, "tokens", 37),))
    sparse, dense = [], []
    for r in range(size):
        own = stripe(table, r, size, interleave)
        assert own.ownership is not None
        pool = layout.allocate(case.pool.num_pages, 4)
        for b, stored in enumerate(case.stored):
            slots = own.slots(torch.full((len(stored),), b), torch.arange(len(stored)))
            layout.write(pool, slots, stored)
        mine = KeySet(geometry.rows, (owned_list(keys.segments[0], own.ownership),))
        part = ops.sparse_mla(case.q_latent, case.q_rope, pool, mine, own, SCALE)
        sparse.append((part.out.data, part.lse.data))
        # The prompt's rows, densely, over this rank's stripe: its entries lie side by side.
        held = own.ownership.num_owned(30)
        entries = ops.context_gather(pool, own, 1, 0, held)
        key = entries[:, None].expand(-1, heads, -1)
        query = torch.cat((case.q_latent.data, case.q_rope.data), -1)[1:]
        visible = own.ownership.num_owned(geometry.rows.kv_len[1:])
        dense.append(ops.dense_mha(query, key, key[..., :rank], visible, SCALE))
    out, lse = case.expected(case.causal(), SCALE)
    for found, first in ((merge_all(ops, sparse), 0), (merge_all(ops, dense), 1)):
        assert torch.allclose(found[0], out[first:], atol=1e-9)
        assert torch.allclose(found[1], lse[first:], atol=1e-9)


def test_f1_a_global_list_does_not_go_through_a_local_table() -> None:
    """Positions that a rank does not own have no slot there: refused, never another entry's."""
    case = op_case([1], [16])
    own = stripe(case.geometry.tables["tokens"], 0, 2, 1)
    lists = causal_list(case.geometry.rows, "tokens", 16)
    with pytest.raises(GeometryError, match="an id has no page"):
        to_slots(lists, case.geometry.rows, own)
    assert isinstance(case.q_latent, RowTensor)
    assert (
        to_slots(lists, case.geometry.rows, own, validate=False).ids[0, 1::2].tolist() == [-1] * 8
    )
