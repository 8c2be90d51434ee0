"""Break one feature of gnomon at a time: the law "transformers = gnomon" has to fail each time.

Without these, a law could pass because nothing it looks at depends on the feature: while prompts
are no longer than index_topk, for one, everything about the indexer could be wrong (oracle_math.md
§4.3).
The handicap changes the engine and not the oracle. What is broken is said by the test's id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.ops.values import RopeRows, RopeTable
from gnomon.models.feed_forward import MixtureOfExperts
from gnomon.models.sparse_mla_model import DecoderLayer, SparseMlaModel
from gnomon.verify.context import Context, Handicap
from gnomon.verify.laws import choose_laws
from gnomon.verify.result import LawResult, Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

MODELS = {
    "deepseek_v32": "random:deepseek_v32,layers=4",
    "glm_moe_dsa": "random:glm_moe_dsa,layers=7",  # F F F S S S F
}
BOTH = tuple(MODELS)
DEEPSEEK, GLM = (BOTH[0],), (BOTH[1],)

Edit = Callable[[DecoderLayer], object]


def in_layers(edit: Edit) -> Handicap:
    """Edit every layer's weights in place."""

    def apply(model: SparseMlaModel) -> None:
        for layer in model.layers:
            edit(layer)

    return Handicap(edit=apply)


def in_mixtures(edit: Callable[[MixtureOfExperts], object]) -> Handicap:
    def apply(layer: DecoderLayer) -> None:
        if isinstance(layer.feed_forward, MixtureOfExperts):
            edit(layer.feed_forward)

    return in_layers(apply)


def in_indexers(choose: Callable[[Any], Tensor], change: Callable[[Tensor], Tensor]) -> Handicap:
    """Change one weight of every indexer."""

    def apply(layer: DecoderLayer) -> None:
        if layer.indexer is not None:
            weight = choose(layer.indexer)
            weight.copy_(change(weight))

    return in_layers(apply)


def as_ones(weight: Tensor) -> Tensor:
    return torch.ones_like(weight)


def rounded(bias: Tensor) -> Tensor:
    return bias.bfloat16().float()


CONTROLS: dict[str, tuple[tuple[str, ...], Handicap]] = {
    "index RoPE half-split for interleaved": (GLM, Handicap({"indexer_rope_interleave": False})),
    "index RoPE interleaved for half-split": (
        DEEPSEEK, Handicap({"indexer_rope_interleave": True}),
    ),
    "index lists of K - 1": (BOTH, Handicap({"index_topk": 15})),
    "index lists of K + 1": (BOTH, Handicap({"index_topk": 17})),
    "index sharing dropped": (GLM, Handicap({"indexer_types": ["full"] * 7})),
    "index sharing one layer early": (GLM, Handicap({"index_skip_topk_offset": 2})),
    "index key norm without weight": (
        BOTH, in_indexers(lambda i: i.transform.norm_weight, as_ones),
    ),
    "index key norm without bias": (
        BOTH, in_indexers(lambda i: i.transform.norm_bias, torch.zeros_like),
    ),
    "index head weights without sign": (
        BOTH, in_indexers(lambda i: i.head_weights.weight, torch.abs),
    ),
    "index heads unweighted": (BOTH, in_indexers(lambda i: i.head_weights.weight, as_ones)),
    "router bias dropped": (BOTH, in_mixtures(lambda m: m.router_bias.zero_())),
    "router bias rounded to bf16": (
        GLM, in_mixtures(lambda m: m.router_bias.copy_(rounded(m.router_bias))),
    ),
    "routed scaling dropped": (BOTH, Handicap({"routed_scaling_factor": 1.0})),
    "expert weights not normalised": (BOTH, Handicap({"norm_topk_prob": False})),
    "one expert too few": (BOTH, Handicap({"num_experts_per_tok": 3})),
    "group limit off": (DEEPSEEK, Handicap({"topk_group": 4})),
    "groups of another size": (DEEPSEEK, Handicap({"n_group": 2, "topk_group": 1})),
    "shared expert dropped": (BOTH, in_mixtures(lambda m: m.shared.down.weight.zero_())),
    "mscale off": (
        DEEPSEEK,
        Handicap({"rope_parameters": {"mscale_all_dim": 0.0, "attention_factor": 1.0}}),
    ),
    "mscale in cos and sin": (DEEPSEEK, Handicap({"rope_parameters.attention_factor": 1.1})),
    "YaRN ramp elsewhere": (DEEPSEEK, Handicap({"rope_parameters.beta_slow": 0.1})),
    "YaRN ramp not rounded": (DEEPSEEK, Handicap({"rope_parameters.truncate": False})),
    "YaRN factor halved": (DEEPSEEK, Handicap({"rope_parameters.factor": 20.0})),
    "another RoPE base": (BOTH, Handicap({"rope_parameters.rope_theta": 5e5})),
    "latent norms with eps 1e-5": (GLM, Handicap({"latent_norm_eps": 1e-5})),
    "block norms with eps 1e-4": (BOTH, Handicap({"rms_norm_eps": 1e-4})),
    "query latent norm without weight": (
        BOTH, in_layers(lambda layer: layer.attention.q_a_norm.fill_(1.0)),
    ),
    "key latent norm without weight": (
        BOTH, in_layers(lambda layer: layer.attention.kv_a_norm.fill_(1.0)),
    ),
}  # fmt: skip
CASES = [
    pytest.param(family, handicap, id=f"{family}: {name}")
    for name, (families, handicap) in CONTROLS.items()
    for family in families
]


def logits_law(family: str, handicap: Handicap | None) -> LawResult:
    settings = VerifySettings.of(model=MODELS[family], prompts=4, max_tokens=2, max_length=129)
    context = Context(settings, handicap=handicap)
    (law,) = choose_laws("transformers_logits")
    return run_law(law, context)


@pytest.mark.parametrize("family", BOTH)
def test_unbroken(family: str) -> None:
    result = logits_law(family, None)
    assert result.verdict is Verdict.PASS, result.failures


@pytest.mark.parametrize(("family", "handicap"), CASES)
def test_broken(family: str, handicap: Handicap) -> None:
    result = logits_law(family, handicap)
    assert result.verdict is Verdict.FAIL
    assert "logits differ" in result.failures[0], result.failures[0]


@pytest.mark.parametrize("family", BOTH)
def test_main_rope_half_split(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both families rotate neighbouring pairs in the attention itself."""
    look_up = RopeTable.at

    def at(self: RopeTable, axis: Any, is_interleaved: bool) -> RopeRows:
        return look_up(self, axis, False)

    monkeypatch.setattr(RopeTable, "at", at)
    assert logits_law(family, None).verdict is Verdict.FAIL
