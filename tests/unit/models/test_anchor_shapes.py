"""Models that speed is measured on: ranks of a published model hold it between them."""

from __future__ import annotations

import math

import pytest

from gnomon.models.anchor_shapes import ANCHORS
from gnomon.models.params import param_specs
from gnomon.models.published_shapes import DEEPSEEK_V32, GLM_5
from gnomon.models.sources import parse_model_spec

RANKS = {
    "h32tp4": (DEEPSEEK_V32, 4),
    "h16tp8": (DEEPSEEK_V32, 8),
    "glm_h16tp4": (GLM_5, 4),
    "glm_h8tp8": (GLM_5, 8),
}


def config_of(name: str):
    return parse_model_spec(f"random:{name}", default_vocab_size=77).config


@pytest.mark.parametrize("name", sorted(RANKS))
def test_a_rank_has_its_share_of_what_is_divided_and_all_of_the_rest(name: str) -> None:
    whole, num_ranks = RANKS[name]
    rank = config_of(name)
    for field in ("num_attention_heads", "intermediate_size", "vocab_size"):
        assert getattr(rank, field) * num_ranks == whole[field], field
    assert rank.moe_intermediate_size * num_ranks == 2048
    assert rank.n_routed_experts == 256
    for field in ("hidden_size", "index_n_heads", "q_lora_rank", "v_head_dim"):
        assert getattr(rank, field) == whole[field], field
    assert (rank.kv_lora_rank, rank.index_topk, rank.index_head_dim) == (512, 2048, 128)


@pytest.mark.parametrize(("name", "num_ranks"), [("h16tp8", 8), ("glm_h8tp8", 8)])
def test_experts_of_a_rank_are_as_many_numbers_as_whole_ones_of_expert_parallel(name, num_ranks):
    """256 eighths of an expert are 32 experts: vLLM's two ways to share a layer."""
    shared = config_of("glm" if name.startswith("glm") else "h128")
    assert shared.n_routed_experts == 256 // num_ranks

    def experts(model):
        specs = [spec for spec in param_specs(model) if ".experts." in spec.name]
        return sum(math.prod(spec.shape) for spec in specs)

    assert experts(config_of(name)) == experts(shared)


def test_every_rank_is_tested() -> None:
    assert {name for name in ANCHORS if "tp" in name} == set(RANKS)
