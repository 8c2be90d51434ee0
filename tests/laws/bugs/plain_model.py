"""The models written out plainly: whole prompts, float64, a dense mask from their own top-k.

In:  a ModelConfig, parameters by engine name, token ids.
Out: `PlainRun`: hidden rows after the final norm, logits, and per layer the set of positions that
     each row attends. Options switch single features off, for negative controls.
Maths: reference/oracle_math.md §1.1-1.7, un-absorbed. It shares no code with gnomon's operators or
     models (only the value ModelConfig), has no cache, no chunks, no padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnomon.models.config import ModelConfig

P = Mapping[str, Tensor]


@dataclass
class PlainRun:
    """[T, D], [T, V], and ``attended[layer][row]``: a set of positions."""

    hidden: Tensor
    logits: Tensor
    attended: list[list[set[int]]]
    layers: list[Tensor] = field(default_factory=list)  # hidden rows after each layer


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def angles(config: ModelConfig, length: int) -> Tensor:
    """[T, dr / 2], YaRN by parts. In float32, as every engine has them (oracle_math §1.3)."""
    dim, theta, yarn = config.qk_rope_head_dim, config.rope.theta, config.rope.yarn
    found = []
    for i in range(dim // 2):
        plain = 1.0 / theta ** torch.tensor(2 * i / dim, dtype=torch.float32)
        if yarn is not None:
            length0 = yarn.original_max_position_embeddings

            def turn(n: float, length0: int = length0) -> float:
                return dim * math.log(length0 / (2 * math.pi * n)) / (2 * math.log(theta))

            low = max(math.floor(turn(yarn.beta_fast)), 0)
            high = min(math.ceil(turn(yarn.beta_slow)), dim - 1)
            high = high + 0.001 if high == low else high
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            plain = plain / yarn.factor * ramp + plain * (1 - ramp)
        found.append(plain)
    frequency = torch.stack(found)
    return torch.arange(length, dtype=torch.float32)[:, None] * frequency


def rotate(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Turn x [T, ..., dr] by angle [T, dr / 2]; pairs (2i, 2i + 1), or (i, i + dr / 2)."""
    half = x.shape[-1] // 2
    shape = (x.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = angle.cos().double().view(shape), angle.sin().double().view(shape)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def index_scores(
    p: P, here: str, config: ModelConfig, h: Tensor, cq: Tensor, interleaved: bool
) -> Tensor:
    """[T, T] before the mask."""
    heads, dim, turned = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    angle = angles(config, len(h))
    query = (cq @ p[here + "wq_b.weight"].T).view(len(h), heads, dim)
    key = h @ p[here + "wk.weight"].T
    key = (key - key.mean(-1, keepdim=True)) / (
        key.var(-1, unbiased=False, keepdim=True) + 1e-6
    ) ** 0.5
    key = key * p[here + "k_norm.weight"] + p[here + "k_norm.bias"]
    query = torch.cat((rotate(query[..., :turned], angle, interleaved), query[..., turned:]), -1)
    key = torch.cat((rotate(key[:, :turned], angle, interleaved), key[:, turned:]), -1)
    weight = h @ p[here + "weights_proj.weight"].double().T
    scores = h.new_zeros(len(h), len(h))
    for head in range(heads):
        dots = (query[:, head] @ key.T).clamp_min(0)
        scores += weight[:, head, None] * dots / math.sqrt(heads * dim)
    return scores


def best_sets(scores: Tensor, k: int) -> list[set[int]]:
    """Higher score first, ties to the lower position, among the positions up to the row's own."""
    found = []
    for row, line in enumerate(scores.tolist()):
        ranked = sorted(range(row + 1), key=lambda s: (-line[s], s))
        found.append(set(ranked[:k]))
    return found


def attention(
    p: P, here: str, config: ModelConfig, h: Tensor, cq: Tensor, attended: Sequence[set[int]]
) -> Tensor:
    """Un-absorbed MLA with a dense mask."""
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    angle = angles(config, len(h))
    q = (cq @ p[here + "q_b.weight"].T).view(len(h), heads, -1)
    raw = h @ p[here + "kv_a.weight"].T
    latent = rms(raw[:, :rank], p[here + "kv_a_norm.weight"], config.latent_norm_eps)
    shared = rotate(raw[:, rank:], angle, True)
    kv = (latent @ p[here + "kv_b.weight"].T).view(len(h), heads, -1)
    turned = rotate(q[..., nope:], angle, True)
    logits = torch.einsum("thd,shd->hts", q[..., :nope], kv[..., :nope])
    logits = (logits + torch.einsum("thd,sd->hts", turned, shared)) * config.softmax_scale()
    mask = torch.full((len(h), len(h)), -torch.inf, dtype=torch.float64)
    for row, keys in enumerate(attended):
        mask[row, sorted(keys)] = 0
    out = torch.einsum("hts,shd->thd", (logits + mask).softmax(-1), kv[..., nope:])
    return out.flatten(1) @ p[here + "o.weight"].T


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ down.T


def experts(p: P, here: str, config: ModelConfig, h: Tensor) -> Tensor:
    """Shared expert plus the chosen ones, token by token."""
    scores = torch.sigmoid(h @ p[here + "router.weight"].double().T)
    biased = scores + p[here + "router.bias"].double()
    out = swiglu(h, p[here + "shared.gate_up.weight"], p[here + "shared.down.weight"])
    size = config.n_routed_experts // config.n_group
    for t in range(len(h)):
        groups = biased[t].view(config.n_group, size)
        rank = groups.sort(-1, descending=True).values[:, :2].sum(-1)
        kept = set(rank.argsort(descending=True)[: config.topk_group].tolist())
        line = [b if e // size in kept else -math.inf for e, b in enumerate(biased[t].tolist())]
        chosen = sorted(range(len(line)), key=lambda e: -line[e])[: config.num_experts_per_tok]
        total = float(scores[t, chosen].sum()) if config.norm_topk_prob else 1.0
        for e in chosen:
            share = float(scores[t, e]) / total * config.routed_scaling_factor
            one = swiglu(h[t : t + 1], p[here + "experts.gate_up"][e], p[here + "experts.down"][e])
            out[t] += share * one[0]
    return out


def plain_run(
    config: ModelConfig,
    params: P,
    tokens: Sequence[int],
    *,
    index_interleaved: bool | None = None,
    is_dense: bool = False,
) -> PlainRun:
    """The whole prompt. ``index_interleaved`` overrides the config; ``is_dense``: attend all."""
    p = {name: value.double() for name, value in params.items()}
    interleaved = config.indexer_rope_interleave if index_interleaved is None else index_interleaved
    x = p["embed.weight"][list(tokens)]
    run = PlainRun(x, x, [])
    for layer in range(config.num_hidden_layers):
        here = f"layers.{layer}."
        h = rms(x, p[here + "input_norm.weight"], config.rms_norm_eps)
        cq = rms(
            h @ p[here + "attn.q_a.weight"].T,
            p[here + "attn.q_a_norm.weight"],
            config.latent_norm_eps,
        )
        if is_dense:
            run.attended.append([set(range(row + 1)) for row in range(len(tokens))])
        elif config.has_indexer(layer):
            scores = index_scores(p, here + "indexer.", config, h, cq, interleaved)
            run.attended.append(best_sets(scores, config.index_topk))
        else:
            run.attended.append(run.attended[-1])
        x = x + attention(p, here + "attn.", config, h, cq, run.attended[-1])
        h = rms(x, p[here + "post_norm.weight"], config.rms_norm_eps)
        if config.is_dense_layer(layer):
            x = x + swiglu(h, p[here + "mlp.gate_up.weight"], p[here + "mlp.down.weight"])
        else:
            x = x + experts(p, here, config, h)
        run.layers.append(x)
    run.hidden = rms(x, p["norm.weight"], config.rms_norm_eps)
    run.logits = run.hidden @ p["lm_head.weight"].T
    return run
