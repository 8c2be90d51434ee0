"""The parameters of a model in training: names, shapes, first values.

In:  a `Shape`, a seed.
Out: a dict of float32 leaf tensors. Names are those of gnomon's `models/params.py`, so that export
     is a renaming; the MTP layer is one layer more, with `enorm`, `hnorm`, `eh_proj` and
     `shared_head.norm` beside a decoder layer's own. It uses the model's embedding and head.
Not here: where a checkpoint stores them (export), what they compute (model, blocks).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.shapes import Shape

Parameters = dict[str, Tensor]
OUTPUTS = ("attn.o.weight", "down.weight", "experts.down")  # what writes to the residual stream


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name to shape, embedding first, then layer by layer, norm and head, the MTP layer last."""
    found: dict[str, tuple[int, ...]] = {"embed.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        found |= _layer(shape, layer)
    found |= {"norm.weight": (shape.hidden,), "lm_head.weight": (shape.vocab, shape.hidden)}
    found |= _layer(shape, shape.mtp)
    own = {
        "enorm.weight": (shape.hidden,),
        "hnorm.weight": (shape.hidden,),
        "eh_proj.weight": (shape.hidden, 2 * shape.hidden),
        "shared_head.norm.weight": (shape.hidden,),
    }
    return found | {f"layers.{shape.mtp}.{name}": size for name, size in own.items()}


def _layer(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, kv_width = shape.hidden, shape.kv_rank + shape.rope
    found: dict[str, tuple[int, ...]] = {
        "input_norm.weight": (hidden,),
        "post_norm.weight": (hidden,),
        "attn.q_a.weight": (shape.q_rank, hidden),
        "attn.q_a_norm.weight": (shape.q_rank,),
        "attn.q_b.weight": (shape.heads * (shape.nope + shape.rope), shape.q_rank),
        "attn.kv_a.weight": (kv_width, hidden),
        "attn.kv_a_norm.weight": (shape.kv_rank,),
        "attn.kv_b.weight": (shape.heads * (shape.nope + shape.value), shape.kv_rank),
        "attn.o.weight": (hidden, shape.heads * shape.value),
    }
    if shape.index_source(layer) == layer:
        found |= {
            "indexer.wq_b.weight": (shape.index_heads * shape.index_dim, shape.q_rank),
            "indexer.wk.weight": (shape.index_dim, hidden),
            "indexer.weights_proj.weight": (shape.index_heads, hidden),
            "indexer.k_norm.weight": (shape.index_dim,),
            "indexer.k_norm.bias": (shape.index_dim,),
        }
    if shape.is_dense(layer):
        found |= {
            "mlp.gate_up.weight": (2 * shape.dense_width, hidden),
            "mlp.down.weight": (hidden, shape.dense_width),
        }
    else:
        inner, experts = shape.expert_width, shape.experts
        found |= {
            "router.weight": (experts, hidden),
            "router.bias": (experts,),
            "experts.gate_up": (experts, 2 * inner, hidden),
            "experts.down": (experts, hidden, inner),
            "shared.gate_up.weight": (2 * inner, hidden),
            "shared.down.weight": (hidden, inner),
        }
    return {f"layers.{layer}.{name}": size for name, size in found.items()}


def initial_parameters(shape: Shape, seed: int, device: torch.device | str) -> Parameters:
    """Fresh parameters. Matrices N(0, 1 / fan-in), what writes to the residual stream smaller."""
    dice = torch.Generator().manual_seed(seed)
    params: Parameters = {}
    for name, size in parameter_shapes(shape).items():
        if len(size) == 1:
            is_zero = name.endswith(("bias",))
            value = torch.zeros(size) if is_zero else torch.ones(size)
        else:
            value = torch.randn(size, generator=dice) * _spread(name, size, shape)
        value = value.to(device)
        params[name] = value.requires_grad_(not name.endswith("router.bias"))
    return params


def _spread(name: str, size: tuple[int, ...], shape: Shape) -> float:
    if name == "embed.weight":
        return 0.5
    spread = 1.0 / math.sqrt(size[-1])
    if name.endswith(OUTPUTS):
        return spread * 0.5 / math.sqrt(2 * shape.layers)
    return spread * (0.5 if name == "lm_head.weight" else 1.0)


def of_layer(params: Parameters, layer: int) -> Parameters:
    """The parameters of one layer, without the layer's prefix."""
    prefix = f"layers.{layer}."
    return {name[len(prefix) :]: p for name, p in params.items() if name.startswith(prefix)}
