"""Checkpoint folders for the loader's tests: written by safetensors itself, not by our exporter.

In:  what a test wants in the folder.
Out: `tiny_config`, `stored_tensors` (random values under hub names, by the list of names in
     oracle_math §2.2), `write_folder`, `assemble`: the engine's parameters, put together by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gnomon.models.config import Family, ModelConfig
from gnomon.models.config_reading import read_config
from gnomon.models.tiny_shapes import tiny_shape

SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "q_lora_rank": 7,
    "kv_lora_rank": 9,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
    "index_n_heads": 3,
    "index_head_dim": 8,
}


def small_shape(family: Family = Family.DEEPSEEK_V32, **fields: object) -> dict[str, object]:
    """A config.json that makes a checkpoint of a few kilobytes."""
    return {**tiny_shape(family), **SMALL, **fields}


def tiny_config(family: Family = Family.DEEPSEEK_V32, **fields: object) -> ModelConfig:
    return read_config(small_shape(family, **fields))


def hub_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every stored tensor, spelt out from oracle_math §2.2."""
    c = config
    hidden, heads = c.hidden_size, c.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c.vocab_size, hidden),
    }
    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        shapes |= {
            p + "input_layernorm.weight": (hidden,),
            p + "post_attention_layernorm.weight": (hidden,),
            a + "q_a_proj.weight": (c.q_lora_rank, hidden),
            a + "q_a_layernorm.weight": (c.q_lora_rank,),
            a + "q_b_proj.weight": (
                heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
                c.q_lora_rank,
            ),
            a + "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, hidden),
            a + "kv_a_layernorm.weight": (c.kv_lora_rank,),
            a + "kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
            a + "o_proj.weight": (hidden, heads * c.v_head_dim),
        }
        if c.indexer_types[layer] == "full":
            shapes |= {
                a + "indexer.wq_b.weight": (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
                a + "indexer.wk.weight": (c.index_head_dim, hidden),
                a + "indexer.weights_proj.weight": (c.index_n_heads, hidden),
                a + "indexer.k_norm.weight": (c.index_head_dim,),
                a + "indexer.k_norm.bias": (c.index_head_dim,),
            }
        if c.mlp_layer_types[layer] == "dense":
            shapes |= swiglu_shapes(p + "mlp.", c.intermediate_size, hidden)
            continue
        shapes[p + "mlp.gate.weight"] = (c.n_routed_experts, hidden)
        shapes[p + "mlp.gate.e_score_correction_bias"] = (c.n_routed_experts,)
        inner = c.moe_intermediate_size
        shapes |= swiglu_shapes(p + "mlp.shared_experts.", inner * c.n_shared_experts, hidden)
        for expert in range(c.n_routed_experts):
            shapes |= swiglu_shapes(p + f"mlp.experts.{expert}.", inner, hidden)
    return shapes


def swiglu_shapes(prefix: str, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def stored_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        key: torch.randn(shape, generator=generator).to(
            torch.float32 if key.endswith("correction_bias") else dtype
        )
        for key, shape in hub_shapes(config).items()
    }


def write_folder(
    folder: Path,
    shape: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    num_shards: int = 1,
    with_index: bool = True,
) -> Path:
    """Write config.json and the tensors, dealt out to the shards like cards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names = [f"model-{n + 1:05d}-of-{num_shards:05d}.safetensors" for n in range(num_shards)]
    weight_map = {key: names[place % num_shards] for place, key in enumerate(tensors)}
    for name in names:
        held = {key: tensors[key] for key, home in weight_map.items() if home == name}
        save_file(held, folder / name)
    if with_index:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assemble(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The engine's parameters by cat and stack over stored tensors."""
    params = {
        "embed.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    attention = {
        "q_a": "q_a_proj",
        "q_a_norm": "q_a_layernorm",
        "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
        "kv_b": "kv_b_proj",
        "o": "o_proj",
    }
    for layer in range(config.num_hidden_layers):
        here, p = f"layers.{layer}.", f"model.layers.{layer}."
        params[here + "input_norm.weight"] = tensors[p + "input_layernorm.weight"]
        params[here + "post_norm.weight"] = tensors[p + "post_attention_layernorm.weight"]
        for name, key in attention.items():
            params[f"{here}attn.{name}.weight"] = tensors[f"{p}self_attn.{key}.weight"]
        if config.indexer_types[layer] == "full":
            for name in ("wq_b.weight", "wk.weight", "weights_proj.weight"):
                params[f"{here}indexer.{name}"] = tensors[f"{p}self_attn.indexer.{name}"]
            for name in ("k_norm.weight", "k_norm.bias"):
                params[f"{here}indexer.{name}"] = tensors[f"{p}self_attn.indexer.{name}"]
        if config.mlp_layer_types[layer] == "dense":
            params |= joined_swiglu(here + "mlp.", p + "mlp.", tensors)
            continue
        params[here + "router.weight"] = tensors[p + "mlp.gate.weight"]
        params[here + "router.bias"] = tensors[p + "mlp.gate.e_score_correction_bias"]
        params |= joined_swiglu(here + "shared.", p + "mlp.shared_experts.", tensors)
        experts = [
            joined_swiglu("", f"{p}mlp.experts.{expert}.", tensors)
            for expert in range(config.n_routed_experts)
        ]
        params[here + "experts.gate_up"] = torch.stack([e["gate_up.weight"] for e in experts])
        params[here + "experts.down"] = torch.stack([e["down.weight"] for e in experts])
    return params


def joined_swiglu(here: str, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gate, up = tensors[prefix + "gate_proj.weight"], tensors[prefix + "up_proj.weight"]
    return {
        here + "gate_up.weight": torch.cat([gate, up]),
        here + "down.weight": tensors[prefix + "down_proj.weight"],
    }
