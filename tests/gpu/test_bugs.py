"""Cases of docs/laws.md that need a GPU: idle processors, long contexts, growing chunks, few heads.

Oracle: float64 on the GPU, or the same kernel on a problem that cannot go wrong.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from gnomon.attention.layouts import Fp8IndexKeyLayout
from gnomon.attention.providers import reference
from gnomon.engine.warm_up import warm_up
from tests.engine.tiny_engine import prompt, request
from tests.gpu.external_truth import captured
from tests.gpu.test_attention import COUNTS, LAYOUTS, agree, draw, truth
from tests.gpu.test_engine import core_on

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CODES = 2.0**-11  # of the sum of the terms' sizes: what FP8 tensor cores may lose


def kernels(module: str) -> Any:
    return importlib.import_module(f"gnomon.attention.providers.triton.{module}")


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_b6_idle_processors_do_not_read_past_the_lengths(num_rows: int) -> None:
    """Behind the lengths of the batch stand long ones, behind its pages a page of NaN."""
    layout = Fp8IndexKeyLayout(128, BF16)
    pool = layout.allocate(3, 64, torch.device("cuda"))
    pool.storage.fill_(0x7F)  # NaN codes and NaN scales
    keys = torch.randn(64, 128, device="cuda").to(BF16)
    layout.write(pool, torch.arange(64, 128, device="cuda"), keys)
    q = layout.round_queries(torch.randn(num_rows, 64, 128, device="cuda").to(BF16))
    weights = torch.randn(num_rows, 64, device="cuda")
    lengths = torch.full((300,), 256, dtype=torch.int32, device="cuda")
    lengths[:num_rows] = 1
    pages = torch.full((300, 4), 2, dtype=torch.int32, device="cuda")
    pages[:num_rows, 0] = 1
    count = lengths[:num_rows]

    def call() -> Any:
        scores = kernels("index").index_scores_paged(
            q, weights, pool, pages[:num_rows], count, 0.01
        )
        return scores, kernels("topk").topk(scores, count, 64)

    key = layout.gather_range(pool, pages[0], 0, 1)
    one = torch.ones_like(count)
    expected = reference.index_scores(q.double(), weights.double(), key.double(), one, 0.01)
    for scores, best in (call(), captured(call)()):
        torch.testing.assert_close(scores[:, :1].double(), expected, atol=1e-3, rtol=1e-3)
        assert bool((scores[:, 1:] == -torch.inf).all())
        assert best.count.tolist() == [1] * num_rows
        assert best.ids.tolist() == [[0] + [-1] * 63] * num_rows
        assert not bool(best.nan_rows.any())


def test_c6_contexts_up_to_a_million_keys() -> None:
    """Eight rows over 64k keys and more, by steps of a third: the ends of the scores are right."""
    layout, num_keys, ends = Fp8IndexKeyLayout(128, BF16), 65536, 500
    q = layout.round_queries(torch.randn(8, 64, 128, device="cuda").to(BF16))
    weights = torch.randn(8, 64, device="cuda")
    while num_keys <= 1 << 20:
        keys = layout.round_queries(torch.randn(num_keys, 1, 128, device="cuda").to(BF16))[:, 0]
        count = torch.full((8,), num_keys, dtype=torch.int32, device="cuda")
        scores = kernels("index").index_scores_codes(q, weights, keys, count, 0.01)
        assert scores.shape == (8, num_keys)
        for part in (slice(0, ends), slice(num_keys - ends, num_keys)):
            few = torch.full_like(count, ends)
            given = (q.double(), weights.double(), keys[part].double())
            expected = reference.index_scores(*given, few, 0.01)
            sizes = reference.index_scores(*(value.abs() for value in given), few, 0.01)
            off = (scores[:, part].double() - expected).abs()
            assert bool((off <= 1e-5 + CODES * sizes).all()), num_keys
        num_keys = num_keys * 13 // 10


def test_m6_fifty_chunks_reserve_what_the_first_ones_did() -> None:
    model = "random:deepseek_v32,layers=2,max_len=4096"
    core = core_on("cuda", model=model, dtype="bfloat16", max_num_batched_tokens=64)
    warm_up(core._parts, lambda *_: None)
    core.add([request("long", prompt(50 * 64), 2)])
    reserved = []
    while core.has_work:
        core.step()
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert len(reserved) >= 50
    assert max(reserved) <= 1.2 * reserved[4]


@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("num_heads", [8, 16])
def test_q2_few_heads_equal_their_share_of_a_padded_run(name: str, num_heads: int) -> None:
    q, q_rope, *rest = draw(LAYOUTS[name], 64, COUNTS, BF16)
    few = (q[:, :num_heads], q_rope[:, :num_heads].contiguous(), *rest)
    attention = kernels("attention")
    agree(attention.KERNELS["sparse_mla"](*few), truth(few), 2.0**-9)
    padded = attention.KERNELS["sparse_mla"](q, q_rope, *rest)
    alone = attention.KERNELS["sparse_mla"](*few)
    torch.testing.assert_close(alone[0], padded[0][:, :num_heads], atol=2.0**-7, rtol=2.0**-6)
    torch.testing.assert_close(alone[1], padded[1][:, :num_heads], atol=1e-4, rtol=1e-5)
