"""The reference kernels against maths that they do not share: complex numbers, SDPA, numpy.

The specs compare every other kernel with the reference; here the reference itself is held to
formulas written another way.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.values import IndexTransform, RopeTable
from gnomon.attention.providers import reference
from gnomon.attention.providers.reference.norms import hadamard, hadamard_matrix
from gnomon.attention.spec.draw import row_axis
from gnomon.errors import ConfigError

WIDE = torch.float64


def rotations(positions: list[int], dim: int, is_interleaved: bool) -> tuple[object, torch.Tensor]:
    """RopeRows and the angles [R, dim / 2] that they must turn by."""
    frequency = 100.0 ** (-torch.arange(dim // 2, dtype=WIDE) / (dim // 2))
    every = torch.arange(max(positions) + 1)[:, None] * frequency
    table = RopeTable(every.cos(), every.sin())
    return table.at(row_axis(positions), is_interleaved), every[positions]


def test_interleaved_rope_multiplies_complex_numbers() -> None:
    rows, angles = rotations([5, 0, 11], 6, True)
    x = torch.randn(3, 2, 6, dtype=WIDE)
    turned = torch.view_as_complex(x.view(3, 2, 3, 2)) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(reference.rope(x, rows), expected, rtol=0, atol=1e-14)


def test_half_split_rope_is_the_interleaved_one_with_columns_moved() -> None:
    positions, dim = [9, 3], 8
    together, _ = rotations(positions, dim, True)
    apart, _ = rotations(positions, dim, False)
    x = torch.randn(2, dim, dtype=WIDE)
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # column of the half-split form, in pair order
    paired = reference.rope(x[:, order], together)
    expected = torch.empty_like(paired)
    expected[:, order] = paired
    torch.testing.assert_close(reference.rope(x, apart), expected, rtol=0, atol=1e-14)


def test_rope_keeps_the_columns_behind_and_depends_on_distance_only() -> None:
    rows, _ = rotations([4, 9, 14], 4, False)
    x = torch.randn(1, 7, dtype=WIDE).expand(3, 7)
    turned = reference.rope(x, rows)
    assert torch.equal(turned[:, 4:], x[:, 4:])
    # Equal vectors five positions apart have equal dot products.
    dots = turned[:, :4] @ turned[:, :4].T
    assert float(dots[0, 1]) == pytest.approx(float(dots[1, 2]), abs=1e-12)


def test_norms_match_numpy() -> None:
    x, weight, bias = torch.randn(5, 12), torch.randn(12), torch.randn(12)
    n, w, b = (t.numpy().astype(np.float64) for t in (x, weight, bias))
    rms = n / np.sqrt(np.mean(n**2, -1, keepdims=True) + 1e-5) * w
    layer = (n - n.mean(-1, keepdims=True)) / np.sqrt(n.var(-1, keepdims=True) + 1e-6) * w + b
    got = reference.rms_norm(x.double(), weight, 1e-5).numpy()
    np.testing.assert_allclose(got, rms, rtol=0, atol=1e-13)
    got = reference.layer_norm(x.double(), weight, bias, 1e-6).numpy()
    np.testing.assert_allclose(got, layer, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dim", [1, 2, 8, 128])
def test_hadamard_is_sylvesters_and_its_own_inverse(dim: int) -> None:
    matrix = torch.ones(1, 1, dtype=WIDE)
    while matrix.shape[0] < dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=WIDE), matrix)
    assert torch.equal(hadamard_matrix(dim), matrix)
    x = torch.randn(3, dim, dtype=WIDE)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=1e-13)


def test_transform_builds_the_same_matrix_and_refuses_other_sizes() -> None:
    transform = IndexTransform(torch.ones(16), torch.zeros(16), 1e-6, has_hadamard=True)
    assert transform.hadamard is not None
    expected = (hadamard_matrix(16) * 16**-0.5).float()
    assert torch.equal(transform.hadamard, expected)
    assert IndexTransform(torch.ones(12), torch.zeros(12)).hadamard is None
    with pytest.raises(ConfigError, match="power of two"):
        IndexTransform(torch.ones(12), torch.zeros(12), 1e-6, has_hadamard=True)


def test_rope_tables_are_refused_in_half_precision_or_of_two_shapes() -> None:
    with pytest.raises(ConfigError, match="float32"):
        RopeTable(torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="max_pos"):
        RopeTable(torch.ones(4, 2), torch.ones(4, 3))


def test_dense_attention_matches_sdpa() -> None:
    q, k, v = (torch.randn(7, 3, n, dtype=WIDE) for n in (6, 6, 4))
    visible = torch.arange(1, 8, dtype=torch.int32)
    out, lse = reference.dense_mha(q, k, v, visible, 0.3)
    expected = F.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, scale=0.3
    )[0].transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    logits = torch.einsum("mhd,nhd->mhn", q, k) * 0.3
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)[:, None]
    expected_lse = logits.masked_fill(hidden, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)


def test_sparse_attention_over_all_slots_is_multi_query_sdpa() -> None:
    pool = PlainLayout(WIDE, 10).allocate(4, 4)
    pool.typed().copy_(torch.randn(16, 10, dtype=WIDE))
    q = torch.randn(3, 2, 10, dtype=WIDE)
    slots = torch.randperm(16)[:9].sort().values.expand(3, 9)
    count = torch.full((3,), 9, dtype=torch.int32)
    out, _ = reference.sparse_mla(q[..., :6], q[..., 6:], pool, slots, count, 0.5)
    keys = pool.typed()[slots[0]].expand(3, 9, 10)
    expected = F.scaled_dot_product_attention(q, keys, keys[..., :6], scale=0.5)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


def test_moe_equals_every_expert_weighted() -> None:
    x, gate_up, down = (torch.randn(*s, dtype=WIDE) for s in ((5, 6), (4, 10, 6), (4, 6, 5)))
    ids = torch.tensor([[0, 2], [3, 1], [2, -1], [-1, -1], [1, 0]])
    weights = torch.rand(5, 2, dtype=WIDE)
    share = torch.zeros(5, 5, dtype=WIDE).scatter_(1, ids + 1, weights)[:, 1:]  # column 0: none
    hidden = torch.einsum("rd,eid->rei", x, gate_up)
    active = F.silu(hidden[..., :5]) * hidden[..., 5:]
    expected = torch.einsum("rei,edi,re->rd", active, down, share)
    got = reference.moe(x, ids, weights, gate_up, down)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_index_scores_match_einsum() -> None:
    q, w, k = (torch.randn(*s, dtype=WIDE) for s in ((3, 4, 5), (3, 4), (6, 5)))
    count = torch.tensor([6, 2, 0], dtype=torch.int32)
    got = reference.index_scores(q, w, k, count, 0.7)
    expected = torch.einsum("mh,mhn->mn", w, torch.einsum("mhd,nd->mhn", q, k).relu()) * 0.7
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(got[1, :2], expected[1, :2], rtol=0, atol=1e-13)
    assert bool((got[1, 2:] == -math.inf).all())
    assert bool((got[2] == -math.inf).all())


def test_topk_ranks_as_lexsort() -> None:
    scores = np.random.default_rng(0).integers(-3, 3, (40, 30)).astype(np.float64)
    count = torch.full((40,), 30, dtype=torch.int32)
    got = reference.topk(torch.from_numpy(scores), count, 7, True)
    order = np.lexsort((np.arange(30) + np.zeros((40, 1)), -scores), axis=-1)
    assert np.array_equal(got.ids.numpy(), np.sort(order[:, :7], axis=1))
    ranked = np.take_along_axis(scores, order, 1)
    assert np.array_equal(got.margin.numpy(), ranked[:, 6] - ranked[:, 7])
