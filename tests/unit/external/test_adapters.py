"""Adapters over libraries that keep to their contracts, against the operators' own specs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.values import RowPages
from gnomon.attention.providers.external import deepgemm, fa3, flashinfer, flashmla
from gnomon.attention.providers.torch.linear import quantise_rows
from gnomon.attention.routes import AttentionDims
from gnomon.attention.spec import SPECS, Scale, check_provider
from gnomon.attention.spec.model import Case
from tests.unit.external.fakes import DeepGemmModule, Fa3Operators, FlashMlaOperators
from tests.unit.external.flashinfer_fake import MlaWrapper

BF16 = torch.bfloat16
DIMS = AttentionDims(
    num_heads=3,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_topk=12,
    index_num_heads=32,
    index_head_dim=128,
)
SMALL = Scale(num_rows=7, num_keys=40, page_size=4, dims=DIMS)
PAGES_OF_64 = replace(SMALL, num_keys=130, page_size=64)
INDEX = Fp8IndexKeyLayout(128, BF16)


def cases(op: str, scale: Scale) -> list[Case]:
    return list(SPECS[op].cases(torch.Generator().manual_seed(5), BF16, scale))


def checked(name: str, kernels: Any, op: str, case: Case) -> None:
    result = check_provider(SPECS[op], KernelSet(name, 1, kernels), case, BF16)
    assert result.is_ok, result


def packed(pool: PagedPool, layout: Any) -> PagedPool:
    """The entries of a plain pool in another layout."""
    made: PagedPool = layout.allocate(pool.num_pages, pool.page_size)
    layout.write(made, torch.arange(pool.num_slots), pool.typed())
    return made


@pytest.mark.parametrize(("num_rows", "splits"), [(1, 0), (128, 0), (129, 1), (1000, 1)])
def test_fa3_sets_nothing_aside_for_splits_of_many_rows(num_rows: int, splits: int) -> None:
    """One long row among short ones would like many, and memory for that of all rows."""
    asked: list[fa3.Call] = []

    def forward(call: fa3.Call) -> tuple[Tensor, Tensor]:
        asked.append(call)
        return torch.zeros(*call.q.shape[:2], 512), torch.zeros(*call.q.shape[1::-1])

    pool = PlainLayout(torch.float32, 576).allocate(1, 4)
    slots, count = torch.zeros(num_rows, 3, dtype=torch.int64), torch.full((num_rows,), 3)
    query = torch.zeros(num_rows, 2, 512), torch.zeros(num_rows, 2, 64)
    fa3.FlashAttention3(forward).sparse_mla(*query, pool, slots, count, 1.0)
    assert [call.num_splits for call in asked] == [splits]


@pytest.mark.parametrize("case", cases("sparse_mla", SMALL), ids=lambda case: case.label)
def test_sparse_mla_over_plain_latents(case: Case) -> None:
    operators = FlashMlaOperators()
    kernels = flashmla.FlashMla(flashmla.library_of_operators(operators)).kernels()
    checked("flashmla", kernels, "sparse_mla", case)
    kernels = fa3.FlashAttention3(fa3.forward_of_operators(Fa3Operators())).kernels()
    checked("fa3", kernels, "sparse_mla", case)
    kernels = flashinfer.FlashInferMla(lambda device: MlaWrapper()).kernels()
    checked("flashinfer", kernels, "sparse_mla", case)


@pytest.mark.parametrize("case", cases("sparse_mla", SMALL), ids=lambda case: case.label)
def test_sparse_mla_over_packed_latents(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    q, q_rope, pool, slots, count, scale = case.arguments
    if "NaN" in case.label:
        pool.typed().nan_to_num_(0.0)
    own = packed(pool, Fp8LatentLayout(512, 64, read_dtype=BF16))
    case = Case(case.label, (q, q_rope, own, slots, count, scale))
    operators = FlashMlaOperators()
    adapter = flashmla.FlashMla(flashmla.library_of_operators(operators))
    checked("flashmla", adapter.kernels(), "sparse_mla", case)
    checked("flashmla", adapter.kernels(), "sparse_mla", case)
    assert operators.num_schedules == (1 if len(q) else 0), (
        "a schedule serves every call of a shape"
    )
    monkeypatch.setattr(flashmla, "MOST_DECODE_ROWS", 2)  # the way of many rows
    checked("flashmla", adapter.kernels(), "sparse_mla", case)
    monkeypatch.setattr(flashmla, "ROWS_AT_ONCE", 3)  # in pieces
    checked("flashmla", adapter.kernels(), "sparse_mla", case)


def test_schedules_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = FlashMlaOperators()
    adapter = flashmla.FlashMla(flashmla.library_of_operators(operators))
    monkeypatch.setattr(flashmla, "MOST_SCHEDULES", 2)
    pool = Fp8LatentLayout(512, 64, read_dtype=BF16).allocate(2, 64)
    for num_rows in (1, 2, 3, 3, 2, 1):
        slots = torch.zeros(num_rows, 1, dtype=torch.int64)
        query = torch.ones(num_rows, 3, 576, dtype=BF16)
        count = torch.ones(num_rows, dtype=torch.int32)
        adapter.sparse_mla(query[..., :512], query[..., 512:], pool, slots, count, 1.0)
    assert operators.num_schedules == 4  # 1, 2, 3, and 1 again


def test_a_schedule_made_while_a_graph_is_captured_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds its numbers only once that graph runs."""
    operators = FlashMlaOperators()
    adapter = flashmla.FlashMla(flashmla.library_of_operators(operators))
    pool = Fp8LatentLayout(512, 64, read_dtype=BF16).allocate(2, 64)
    query, slots = torch.ones(2, 3, 576, dtype=BF16), torch.zeros(2, 1, dtype=torch.int64)
    count = torch.ones(2, dtype=torch.int32)
    for is_capturing, num_made in ((True, 1), (True, 2), (False, 3), (True, 3), (False, 3)):
        monkeypatch.setattr(flashmla, "_is_capturing", lambda _, given=is_capturing: given)
        adapter.sparse_mla(query[..., :512], query[..., 512:], pool, slots, count, 1.0)
        assert operators.num_schedules == num_made


def test_a_schedule_that_a_captured_graph_reads_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: addresses in a graph are held strongly, however many shapes run eagerly after it."""
    operators = FlashMlaOperators()
    library = flashmla.library_of_operators(operators)
    made: list[weakref.ref[Tensor]] = []

    def decode(*arguments: Any) -> Any:
        out = library.decode(*arguments)
        made.append(weakref.ref(out[2][0]))
        return out

    adapter = flashmla.FlashMla(replace(library, decode=decode))
    monkeypatch.setattr(flashmla, "MOST_SCHEDULES", 2)
    pool = Fp8LatentLayout(512, 64, read_dtype=BF16).allocate(2, 64)

    def run(num_rows: int, *, is_capturing: bool) -> None:
        monkeypatch.setattr(flashmla, "_is_capturing", lambda _: is_capturing)
        query, slots = torch.ones(num_rows, 3, 576, dtype=BF16), torch.zeros(num_rows, 1).long()
        count = torch.ones(num_rows, dtype=torch.int32)
        adapter.sparse_mla(query[..., :512], query[..., 512:], pool, slots, count, 1.0)

    run(4, is_capturing=False)
    run(4, is_capturing=True)
    for num_rows in (1, 2, 3, 5, 6):
        run(num_rows, is_capturing=False)
    gc.collect()
    assert made[0]() is not None
    assert made[2]() is None, "of shapes that were not captured, the latest are kept"
    num_schedules = operators.num_schedules
    run(4, is_capturing=False)
    assert operators.num_schedules == num_schedules


@pytest.mark.parametrize("num_heads", [1, 16, 64, 65, 128])
def test_heads_are_padded_and_cut(num_heads: int) -> None:
    dims = replace(DIMS, num_heads=num_heads)
    case = cases("sparse_mla", replace(SMALL, num_rows=2, dims=dims))[0]
    kernels = flashmla.FlashMla(flashmla.library_of_operators(FlashMlaOperators())).kernels()
    checked("flashmla", kernels, "sparse_mla", case)


@pytest.mark.parametrize("case", cases("dense_mha", SMALL), ids=lambda case: case.label)
def test_dense_mha(case: Case) -> None:
    kernels = fa3.FlashAttention3(fa3.forward_of_operators(Fa3Operators())).kernels()
    checked("fa3", kernels, "dense_mha", case)


@pytest.mark.parametrize("first", [-3, 0, 1, 4, 30, 40, 55])
def test_dense_mha_over_a_part_of_the_context(first: int) -> None:
    """Rows before, in and behind a chunk of 40 keys: none, some or all of it."""
    typical = cases("dense_mha", SMALL)[0].arguments
    q = typical[0]
    k, v = (torch.randn(40, 3, n, dtype=BF16) for n in (192, 128))
    visible = torch.arange(first, first + len(q)).clamp(0, 40).to(torch.int32)
    kernels = fa3.FlashAttention3(fa3.forward_of_operators(Fa3Operators())).kernels()
    checked("fa3", kernels, "dense_mha", Case(f"from {first}", (q, k, v, visible, 0.1)))


@pytest.mark.parametrize("case", cases("index_scores", SMALL), ids=lambda case: case.label)
def test_index_scores(case: Case) -> None:
    q, weights, keys, count, scale = case.arguments
    case = Case(
        case.label, (INDEX.round_queries(q), weights, INDEX.round_queries(keys), count, scale)
    )
    kernels = deepgemm.DeepGemm(DeepGemmModule(), 132).kernels()
    checked("deepgemm", kernels, "index_scores", case)


@pytest.mark.parametrize("case", cases("index_scores_paged", PAGES_OF_64), ids=lambda c: c.label)
def test_index_scores_paged(case: Case) -> None:
    q, weights, pool, pages, count, scale = case.arguments
    pool.typed().nan_to_num_(3.0)
    own = packed(pool, INDEX)
    case = Case(case.label, (INDEX.round_queries(q), weights, own, pages, count, scale))
    kernels = deepgemm.DeepGemm(DeepGemmModule(), 132).kernels()
    checked("deepgemm", kernels, "index_scores_paged", case)


def test_lazy_scores_are_those_of_the_operators() -> None:
    """Below a row's count they are equal to the bit; nothing else is read."""
    q, weights, pool, pages, count, scale = cases("index_scores_paged", PAGES_OF_64)[0].arguments
    pool.typed().nan_to_num_(3.0)
    own, q = packed(pool, INDEX), INDEX.round_queries(q)
    adapter = deepgemm.DeepGemm(DeepGemmModule(), 132)
    whole = adapter.index_scores_paged(q, weights, own, pages, count, scale)
    seen = torch.arange(whole.shape[1]) < count[:, None]
    for request in (None, torch.arange(len(q), dtype=torch.int32)):
        rows = RowPages(pages, request, 64)
        lazy = adapter.lazy_scores_paged(q, weights, own, rows, count, scale, (130, 12))
        assert lazy.shape == (len(q), 130)
        assert torch.equal(lazy[seen[:, :130]], whole[:, :130][seen[:, :130]])
    row = int(count.argmax())
    num_keys, one = int(count[row]), count.clamp_max(int(count[row]))
    keys = own.layout.gather_range(own, pages[row], 0, num_keys)
    expected = adapter.index_scores(q, weights, keys, one, scale)
    lazy = adapter.lazy_scores(q, weights, own, pages[row], num_keys, one, scale)
    seen = torch.arange(num_keys) < one[:, None]
    assert torch.equal(lazy[seen], expected[seen])


@pytest.mark.parametrize("case", cases("linear_fp8", SMALL), ids=lambda case: case.label)
def test_linear_fp8(case: Case) -> None:
    checked("deepgemm", deepgemm.DeepGemm(DeepGemmModule(), 132).kernels(), "linear_fp8", case)


@pytest.mark.parametrize("shape", [(1, 128, 64), (5, 256, 192), (0, 128, 64), (3, 384, 576)])
def test_linear_fp8_of_the_librarys_shapes(shape: tuple[int, int, int]) -> None:
    num_rows, width, num_columns = shape
    x_codes, x_scales = quantise_rows(torch.randn(num_rows, width), False)
    codes = torch.randn(num_columns, width).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-num_columns // 128), -(-width // 128)) + 0.5
    case = Case("a shape", (x_codes, x_scales, codes, scales, BF16))
    checked("deepgemm", deepgemm.DeepGemm(DeepGemmModule(), 132).kernels(), "linear_fp8", case)


@pytest.mark.parametrize(
    ("num_rows", "blocks"), [(3, [3]), (4, [4]), (8, [4, 4]), (9, [4, 4, 1]), (11, [4, 4, 4])]
)
def test_many_rows_go_by_blocks(
    num_rows: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one size, so that one compiled kernel serves; a small rest follows."""
    monkeypatch.setattr(deepgemm, "BLOCK_ROWS", 4)
    module, seen = DeepGemmModule(), []
    plain = module.fp8_gemm_nt

    def counted(a: Any, *arguments: Any, **options: Any) -> None:
        seen.append(a[0].shape[0])
        plain(a, *arguments, **options)

    monkeypatch.setattr(module, "fp8_gemm_nt", counted, raising=False)
    x_codes, x_scales = quantise_rows(torch.randn(num_rows, 256), False)
    codes = torch.randn(192, 256).to(torch.float8_e4m3fn)
    case = Case("blocks", (x_codes, x_scales, codes, torch.rand(2, 2) + 0.5, BF16))
    checked("deepgemm", deepgemm.DeepGemm(module, 132).kernels(), "linear_fp8", case)
    assert seen == blocks
