"""The parameters of a model: their names and shapes here, and where a checkpoint stores them.

In:  a `ModelConfig`.
Out: `param_specs(config)`: one `ParamSpec` per tensor of the engine, in a stable order, each with
     the stored tensors it is made of and the place of each within it.
Names: oracle_math §2.2 (one tensor per expert, as on the hub and as `save_pretrained` writes) and
     §2.4 (experts stacked, as `save_pretrained(save_original_format=False)` writes).
Not here: bytes (loading), which stored tensors may be left over (extras), layers that compute.

Every matrix is [out, in] as stored. Gate rows come before up rows. A tied head has no spec of its
own: whoever makes parameters puts the embedding's tensor under "lm_head.weight" too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from gnomon.models.config import ModelConfig

Shape = tuple[int, ...]
Region = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One stored tensor: its name, its shape, and `param[index]`, the place that it fills.

    The place is contiguous (whole rows of the last axis), so that bytes can be read into it.
    """

    key: str
    shape: Shape
    index: Region


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One tensor of the engine.

    `keep_fp32`: float32 whatever the engine's dtype is. So are the router (weight and bias: choices
    flip within a few bf16 steps, and a bf16 weight is exact in fp32) and the indexer's
    `weights_proj` (its rounding moves the selection); all three are small.
    `sources` fill the tensor exactly. `stacked` is the other spelling: one stored tensor that is
    the whole parameter.
    """

    name: str
    shape: Shape
    keep_fp32: bool
    sources: tuple[Source, ...]
    stacked: Source | None = None


def param_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Every parameter of the model, embedding first, then layer by layer, norm and head last."""
    return tuple(_specs(config))


def param_dtype(spec: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter in an engine of `dtype`: never below float32 where that is kept."""
    return torch.promote_types(dtype, torch.float32) if spec.keep_fp32 else dtype


Value = TypeVar("Value")


def with_tied_head(config: ModelConfig, params: dict[str, Value]) -> dict[str, Value]:
    """The same dict; a tied head is the embedding's own tensor under a second name."""
    if config.tie_word_embeddings:
        params["lm_head.weight"] = params["embed.weight"]
    return params


def hub_layer_prefix(layer: int) -> str:
    """How the stored names of a layer begin; the dot belongs to it."""
    return f"model.layers.{layer}."


def _specs(config: ModelConfig) -> Iterator[ParamSpec]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield _whole("embed.weight", "model.embed_tokens.weight", (vocab, hidden))
    for layer in range(config.num_hidden_layers):
        here, stored = f"layers.{layer}.", hub_layer_prefix(layer)
        norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
        for name, key in norms.items():
            yield _whole(f"{here}{name}.weight", f"{stored}{key}.weight", (hidden,))
        yield from _attention(config, f"{here}attn.", f"{stored}self_attn.")
        if config.has_indexer(layer):
            yield from _indexer(config, f"{here}indexer.", f"{stored}self_attn.indexer.")
        if config.is_dense_layer(layer):
            yield from _swiglu(f"{here}mlp.", f"{stored}mlp.", config.intermediate_size, hidden)
        else:
            yield from _mixture(config, here, f"{stored}mlp.")
    yield _whole("norm.weight", "model.norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield _whole("lm_head.weight", "lm_head.weight", (vocab, hidden))


def _whole(name: str, key: str, shape: Shape, keep_fp32: bool = False) -> ParamSpec:
    """A parameter that is stored as one tensor of its own shape."""
    return ParamSpec(name, shape, keep_fp32, (Source(key, shape, ()),))


def _attention(config: ModelConfig, here: str, stored: str) -> Iterator[ParamSpec]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    kv_head = config.qk_nope_head_dim + config.v_head_dim
    shapes: dict[str, tuple[str, Shape]] = {
        "q_a": ("q_a_proj", (q_rank, hidden)),
        "q_a_norm": ("q_a_layernorm", (q_rank,)),
        "q_b": ("q_b_proj", (heads * config.qk_head_dim, q_rank)),
        "kv_a": ("kv_a_proj_with_mqa", (kv_rank + config.qk_rope_head_dim, hidden)),
        "kv_a_norm": ("kv_a_layernorm", (kv_rank,)),
        "kv_b": ("kv_b_proj", (heads * kv_head, kv_rank)),
        "o": ("o_proj", (hidden, heads * config.v_head_dim)),
    }
    for name, (key, shape) in shapes.items():
        yield _whole(f"{here}{name}.weight", f"{stored}{key}.weight", shape)


def _indexer(config: ModelConfig, here: str, stored: str) -> Iterator[ParamSpec]:
    heads, dim, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
    shapes: dict[str, Shape] = {
        "wq_b.weight": (heads * dim, config.q_lora_rank),
        "wk.weight": (dim, hidden),
        "weights_proj.weight": (heads, hidden),
        "k_norm.weight": (dim,),
        "k_norm.bias": (dim,),
    }
    for name, shape in shapes.items():
        keep_fp32 = name.startswith("weights_proj")
        yield _whole(here + name, stored + name, shape, keep_fp32)


def _swiglu(here: str, stored: str, inner: int, hidden: int) -> Iterator[ParamSpec]:
    """gate_up [2I, D] of two stored matrices, and down [D, I]."""
    gate_up = (
        Source(f"{stored}gate_proj.weight", (inner, hidden), (slice(0, inner),)),
        Source(f"{stored}up_proj.weight", (inner, hidden), (slice(inner, 2 * inner),)),
    )
    yield ParamSpec(f"{here}gate_up.weight", (2 * inner, hidden), False, gate_up)
    yield _whole(f"{here}down.weight", f"{stored}down_proj.weight", (hidden, inner))


def _mixture(config: ModelConfig, here: str, stored: str) -> Iterator[ParamSpec]:
    num_experts, hidden = config.n_routed_experts, config.hidden_size
    yield _whole(f"{here}router.weight", f"{stored}gate.weight", (num_experts, hidden), True)
    bias = f"{stored}gate.e_score_correction_bias"
    yield _whole(f"{here}router.bias", bias, (num_experts,), True)
    yield from _experts(config, f"{here}experts.", f"{stored}experts.")
    inner = config.shared_intermediate_size
    yield from _swiglu(f"{here}shared.", f"{stored}shared_experts.", inner, hidden)


def _experts(config: ModelConfig, here: str, stored: str) -> Iterator[ParamSpec]:
    """experts.gate_up [E, 2I, D] and experts.down [E, D, I]."""
    num_experts, hidden = config.n_routed_experts, config.hidden_size
    inner = config.moe_intermediate_size
    gate_up = tuple(
        Source(f"{stored}{expert}.{key}.weight", (inner, hidden), (expert, rows))
        for expert in range(num_experts)
        for key, rows in (
            ("gate_proj", slice(0, inner)),
            ("up_proj", slice(inner, 2 * inner)),
        )
    )
    shape = (num_experts, 2 * inner, hidden)
    stacked = Source(f"{stored}gate_up_proj", shape, ())
    yield ParamSpec(f"{here}gate_up", shape, False, gate_up, stacked)
    down = tuple(
        Source(f"{stored}{expert}.down_proj.weight", (hidden, inner), (expert,))
        for expert in range(num_experts)
    )
    shape = (num_experts, hidden, inner)
    stacked = Source(f"{stored}down_proj", shape, ())
    yield ParamSpec(f"{here}down", shape, False, down, stacked)
