"""transformers = gnomon for shapes that differ from the tiny ones in what could matter.

Groups of experts with a bias, every rule of index sharing, layers that share at the end, Hadamard,
32 index heads, ranks that are no multiple of 16, wide heads, tied embeddings, no dense layer, one
expert, K of 1 and K beyond every prompt. Each shape runs six prompts around its own seam.
"""

from __future__ import annotations

import pytest

from gnomon.verify.context import Context
from gnomon.verify.laws import choose_laws
from gnomon.verify.result import Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

DEEPSEEK = "random:deepseek_v32,layers=3"
GLM = "random:glm_moe_dsa,layers=7"
SHAPES = {
    "eight groups of two": f"{DEEPSEEK},n_group=8,topk_group=4",
    "two groups of eight, one kept": f"{DEEPSEEK},n_group=2,topk_group=1",
    "groups in GLM": f"{GLM},n_group=4,topk_group=2",
    "one group in DeepSeek": f"{DEEPSEEK},n_group=1,topk_group=1",
    "last layers share": f"{GLM},pattern=FFSSFSS",
    "every other layer shares": f"{GLM},index_topk_freq=2,index_skip_topk_offset=1",
    "sharing with the default offset": "random:glm_moe_dsa,layers=9,index_topk_freq=3",
    "one indexer for all": f"{GLM},pattern=FSSSSSS",
    "no sharing": f"{GLM},pattern=FFFFFFF",
    "Hadamard": f"{DEEPSEEK},hadamard=true",
    "Hadamard, GLM": f"{GLM},hadamard=true",
    "32 index heads": f"{DEEPSEEK},index_heads=32",
    "32 index heads, GLM": f"{GLM},index_heads=32",
    "index heads of the rope width": f"{DEEPSEEK},index_dim=16",
    "odd ranks": f"{DEEPSEEK},q_rank=89,kv_rank=51",
    "odd ranks, GLM": f"{GLM},q_rank=90,kv_rank=37",
    "odd widths": f"{DEEPSEEK},hidden=190,intermediate_size=333,moe_intermediate_size=75",
    "other head widths": f"{GLM},heads=3,nope_dim=40,rope_dim=12,v_dim=24",
    "tied embeddings": f"{DEEPSEEK},tie_word_embeddings=true",
    "no dense layer": f"{DEEPSEEK},dense_layers=0",
    "dense layers only": f"{GLM},dense_layers=7",
    "dense and mixed by list": f"{DEEPSEEK},mlp_layer_types=sparse+dense+sparse",
    "two shared experts": f"{DEEPSEEK},n_shared_experts=2",
    "one expert per token": f"{GLM},experts_per_token=1",
    "weights not normalised": f"{DEEPSEEK},norm_topk_prob=false,routed_scaling_factor=1.5",
    "K = 1": f"{DEEPSEEK},topk=1",
    "K = 64": f"{GLM},topk=64",
    "K beyond every prompt": f"{DEEPSEEK},topk=512",
    "odd vocabulary": f"{GLM},vocab=389",
}
LAWS = "transformers_logits,transformers_choices,transformers_tokens"


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES.keys())
def test_shape(spec: str) -> None:
    settings = VerifySettings.of(model=spec, prompts=6, max_tokens=6, max_length=150, seed=1)
    context = Context(settings)
    for law in choose_laws(LAWS):
        result = run_law(law, context)
        assert result.verdict is Verdict.PASS, result.failures
        assert result.cases == 6
