"""The token-wise parts of a layer: everything but attention over other tokens.

In:  the residual stream x [N, D] float32, one layer's parameters, rotary rows.
Out: `project`: what attention and indexer need; `combine`: the stream after attention and
     feed-forward.
Maths: oracle_math §1.2–1.5 and §1.7. All experts run on all tokens and those that a token did not
choose get weight 0: the same function as running the chosen ones, and one matrix product.
Matrix products run in `dtype`; norms, rotations, router and the residual stream in float32.
N is the same at every stage of training, so these functions are compiled once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training.parameters import Parameters
from training.shapes import Shape

INDEX_NORM_EPS = 1e-6


class Projected(NamedTuple):
    """A layer's projections of N tokens. The index tensors carry no gradient back to x."""

    q_nope: Tensor  # [N, H, dn]
    q_rope: Tensor  # [N, H, dr], rotated
    latent: Tensor  # [N, D_c], normalised
    k_rope: Tensor  # [N, dr], rotated
    index_q: Tensor  # [N, Hi, Di]
    index_k: Tensor  # [N, Di]
    index_w: Tensor  # [N, Hi] float32


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The product x W^T with both rounded to `dtype`."""
    return F.linear(x.to(dtype), weight.to(dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32, whatever comes in."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn pairs of columns of x [N, ..., dr] by the angles of cos, sin [N, dr / 2]."""
    kept = x.dtype
    x = x.float()
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(kept)


def project(
    x: Tensor, w: Parameters, rotary: tuple[Tensor, Tensor], shape: Shape, dtype: torch.dtype,
    index_interleaved: bool,
) -> Projected:  # fmt: skip
    """Projections of the stream. A layer without an indexer gives empty index tensors."""
    cos, sin = rotary
    h = rms_norm(x, w["input_norm.weight"], shape.eps)
    q_latent = rms_norm(linear(h, w["attn.q_a.weight"], dtype), w["attn.q_a_norm.weight"],
                        shape.latent_eps)  # fmt: skip
    q = linear(q_latent, w["attn.q_b.weight"], dtype).view(len(x), shape.heads, -1)
    kv = linear(h, w["attn.kv_a.weight"], dtype)
    latent = rms_norm(kv[:, : shape.kv_rank], w["attn.kv_a_norm.weight"], shape.latent_eps)
    index_q = index_k = index_w = x.new_empty(0)
    if "indexer.wk.weight" in w:
        h, q_latent = h.detach(), q_latent.detach()
        index_q = linear(q_latent, w["indexer.wq_b.weight"], dtype)
        index_q = index_q.view(len(x), shape.index_heads, shape.index_dim)
        index_k = F.layer_norm(
            linear(h, w["indexer.wk.weight"], dtype).float(),
            (shape.index_dim,), w["indexer.k_norm.weight"], w["indexer.k_norm.bias"],
            INDEX_NORM_EPS,
        ).to(dtype)  # fmt: skip
        index_q = _rotate_front(index_q, cos, sin, index_interleaved, shape.rope)
        index_k = _rotate_front(index_k, cos, sin, index_interleaved, shape.rope)
        index_w = F.linear(h, w["indexer.weights_proj.weight"])
    return Projected(
        q[..., : shape.nope],
        rotate(q[..., shape.nope :], cos, sin, True),
        latent.to(dtype),
        rotate(kv[:, shape.kv_rank :], cos, sin, True),
        index_q,
        index_k,
        index_w,
    )


def _rotate_front(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dim: int) -> Tensor:
    """Rotate the first `dim` columns; the others pass."""
    if dim == x.shape[-1]:
        return rotate(x, cos, sin, interleaved)
    return torch.cat((rotate(x[..., :dim], cos, sin, interleaved), x[..., dim:]), dim=-1)


def combine(
    x: Tensor, attended: Tensor, w: Parameters, shape: Shape, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The stream after attention [N, H * dv] and feed-forward; each expert's number of tokens."""
    x = x + linear(attended, w["attn.o.weight"], dtype)
    h = rms_norm(x, w["post_norm.weight"], shape.eps)
    if "mlp.down.weight" in w:
        out = _swiglu(h, w["mlp.gate_up.weight"], w["mlp.down.weight"], dtype)
        return x + out, x.new_empty(0)
    routed, load = _experts(h, w, shape, dtype)
    shared = _swiglu(h, w["shared.gate_up.weight"], w["shared.down.weight"], dtype)
    return x + routed + shared, load


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    gate, up = linear(x, gate_up, dtype).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down, dtype)


def route(h: Tensor, w: Parameters, shape: Shape) -> Tensor:
    """Weight of every expert for every token [N, E], 0 where it was not chosen."""
    scores = F.linear(h, w["router.weight"]).sigmoid()
    choice = (scores + w["router.bias"]).detach()
    if shape.top_groups < shape.groups:
        grouped = choice.view(len(h), shape.groups, -1)
        strength = grouped.topk(2, dim=-1).values.sum(-1)
        kept = strength.topk(shape.top_groups, dim=-1).indices
        is_kept = torch.zeros_like(strength).scatter(1, kept, 1.0) > 0
        choice = grouped.masked_fill(~is_kept[:, :, None], -torch.inf).flatten(1)
    chosen = choice.topk(shape.experts_per_token, dim=-1).indices
    weights = scores * torch.zeros_like(scores).scatter(1, chosen, 1.0)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.routed_scale


def _experts(h: Tensor, w: Parameters, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weights = route(h, w, shape)
    inner = linear(h, w["experts.gate_up"].flatten(0, 1), dtype)
    gate, up = inner.view(len(h), shape.experts, 2, shape.expert_width).unbind(2)
    hidden = F.silu(gate) * up * weights.to(dtype)[:, :, None]
    down = w["experts.down"].transpose(0, 1).flatten(1)  # [D, E * I]
    return linear(hidden.flatten(1), down, dtype), (weights > 0).float().sum(0).detach()
