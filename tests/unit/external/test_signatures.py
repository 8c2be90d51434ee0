"""Torch operators of another version of a library are refused before they are called."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gnomon.attention.providers.external import fa3, flashmla
from gnomon.attention.providers.external.places import Places
from gnomon.errors import UnsupportedError
from tests.unit.external.fakes import Fa3Operators, FlashMlaOperators

FWD = (  # as vLLM 0.25.1's _vllm_fa3_C registers it
    "(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
SPACE = "gnomon_test_signatures"


@pytest.fixture(scope="module")
def library() -> Iterator[None]:
    held = torch.library.Library(SPACE, "DEF")
    held.define(f"fwd{FWD}")
    held.define("three(Tensor a, int b, Tensor? c) -> Tensor")
    held.define("two_and_a_default(Tensor a, int b, int c=1, *, int d=2) -> Tensor")
    held.define("by_name_only(Tensor a, *, int b) -> Tensor")
    yield
    held._destroy()


@pytest.mark.parametrize(
    ("name", "counts"),
    [("fwd", {37}), ("three", {3}), ("two_and_a_default", {2, 3}), ("by_name_only", set())],
)
def test_an_operator_takes_so_many_arguments_by_place(
    library: None, name: str, counts: set[int]
) -> None:
    for count in range(40):
        if count in counts:
            found = Places(None).operators("none.so", SPACE, {name: count})
            assert found is getattr(torch.ops, SPACE)
        else:
            with pytest.raises(UnsupportedError, match=rf"{SPACE}\.{name} takes other arguments"):
                Places(None).operators("none.so", SPACE, {name: count})


def test_the_adapters_say_how_many_arguments_they_give() -> None:
    """Counted where they call: a recorder in place of the library."""
    given: dict[str, int] = {}

    class Counting:
        def __init__(self, operators: object) -> None:
            self._operators = operators

        def __getattr__(self, name: str) -> object:
            run = getattr(self._operators, name)

            def call(*arguments: object) -> object:
                given[name] = len(arguments)
                return run(*arguments)

            return call

    bf16 = torch.bfloat16
    query = torch.ones(2, 64, 576, dtype=bf16)
    library = flashmla.library_of_operators(Counting(FlashMlaOperators()))
    entries, lists = torch.ones(64, 1, 576, dtype=bf16), torch.zeros(2, 1, 128, dtype=torch.int32)
    library.prefill(query, entries, lists, 1.0, torch.ones(2, dtype=torch.int32))
    pages = torch.zeros(1, 64, 1, 656, dtype=torch.uint8)
    library.decode(query[:, None], pages, lists[..., :64], 1.0, None)
    assert {name: given.pop(name) for name in flashmla.OPERATORS} == flashmla.OPERATORS
    forward = fa3.forward_of_operators(Counting(Fa3Operators()))
    keys = torch.ones(1, 3, 64, 192, dtype=bf16)
    bounds, count = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    q, values = keys[0], keys[..., :128].contiguous()
    forward(fa3.Call(q, keys, values, bounds, count, 3, 1.0, True))
    assert given == {"fwd": fa3.NUM_ARGUMENTS}
