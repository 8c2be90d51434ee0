"""A decode step of a whole FP8 model by the triton provider, under the interpreter.

How many kernels a MoE layer launches, that a published checkpoint's layer launches the same ones,
and that with fusions it computes what it does without.

Counted are kernels and those operators of torch that run one on a GPU. Splits of K, which tiny
layers do not have, add a launch to a few products: tests/gpu/test_launches.py counts those too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.ops.operators import Operators
from gnomon.attention.providers.triton import PROVIDER
from gnomon.models.checkpoint import read_checkpoint
from gnomon.models.config import ModelConfig
from gnomon.models.export import save_checkpoint
from gnomon.models.feed_forward import MixtureOfExperts
from gnomon.models.linear import Param, WideLinear, exact_parts
from gnomon.models.load_plan import plan_load
from gnomon.models.loading import load_planned
from gnomon.models.random_model import random_params, random_weights
from gnomon.models.registry import build_model
from gnomon.models.sparse_mla_model import DecoderLayer
from tests.laws.bugs.tiny import NUM_POSITIONS, Bench, Request, token_list

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
BF16 = torch.bfloat16
FIELDS = {
    **{"hidden": 256, "moe_intermediate_size": 128, "intermediate_size": 128, "q_rank": 128},
    **{"nope_dim": 64},  # a head of 128 columns: attention's queries are whole blocks
    **{"v_dim": 128, "kv_rank": 512, "rope_dim": 64, "index_dim": 128, "heads": 2},
    **{"index_heads": 16, "experts": 4, "n_group": 1, "fp8": "true", "scoring_func": "sigmoid"},
}
FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "view", "_unsafe_view", "reshape"),
    *("transpose", "slice", "select", "expand", "as_strided", "t", "permute", "unsqueeze"),
    *("squeeze", "split", "split_with_sizes", "alias", "detach", "unbind", "chunk", "narrow"),
}
"""Operators of torch that give a view or memory."""


class LaunchCounter(TorchDispatchMode):
    """Launches by layer: kernels by their name, torch's operators as aten.NAME."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.by_layer: dict[int, Counter[str]] = {}
        self.layer = -1
        self._is_inside = False
        run = interpreter.GridExecutor.__call__

        def counted(executor: Any, *arguments: Any, **options: Any) -> Any:
            self._count(executor.fn.__name__)
            self._is_inside = True
            try:
                return run(executor, *arguments, **options)
            finally:
                self._is_inside = False

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name not in FREE and not self._is_inside:
            self._count(f"aten.{name}")
        return func(*args, **(kwargs or {}))

    def begin_layer(self, layer: int) -> None:
        self.layer = layer

    def _count(self, name: str) -> None:
        self.by_layer.setdefault(self.layer, Counter())[name] += 1


def as_on_a_gpu(layer: DecoderLayer) -> DecoderLayer:
    """Its wide linears in parts, which only a GPU's models have."""

    def cut(linear: WideLinear) -> WideLinear:
        parts = exact_parts(linear.weight, BF16)
        assert parts is not None
        return WideLinear(linear.weight, parts.flatten(0, 1))

    indexer, block = layer.indexer, layer.feed_forward
    assert indexer is not None
    indexer = replace(indexer, head_weights=cut(indexer.head_weights))
    if isinstance(block, MixtureOfExperts):
        block = replace(block, router=cut(block.router))
    return replace(layer, indexer=indexer, feed_forward=block)


def published(config: ModelConfig, folder: Path) -> dict[str, Param]:
    """The weights of a folder in the published format, with every matrix FP8 that is FP8 there."""
    plain = random_params(config, 0, torch.float32)
    save_checkpoint(folder, config, plain, shards=2, dtype=BF16, fp8=config.quantization)
    return load_planned(plan_load(read_checkpoint(folder), config), BF16, has_fp8=True)


def decoding(kv_layout: str, folder: Path | None = None) -> tuple[Bench, list[Request]]:
    """A model with requests whose prompts but one token are in the cache.

    Its weights are random, or those of a checkpoint that is written to ``folder``.
    """
    bench = Bench("T0", FIELDS, page_size=16, num_pages=40, kv_layout=kv_layout, dtype=BF16)
    if folder is None:
        params = random_weights(bench.config, 0, BF16, has_fp8=True)
    else:
        params = published(bench.config, folder)
    bench.model = build_model(bench.config, params, NUM_POSITIONS)
    lengths = {"a": 44, "b": 45, "c": 46}
    requests = [bench.request(name, token_list(n, n)) for name, n in lengths.items()]
    bench.step([(one, len(one.tokens) - 1) for one in requests])
    return bench, requests


def operators(bench: Bench, kv_layout: str, is_deterministic: bool = False) -> Operators:
    """The triton provider's, as a decode step has them."""
    layout = bench.pools["layers.0.latent"].layout.id
    index = bench.pools["layers.0.index_key"].layout.id
    need = OpNeed(
        dtype=BF16,
        dims=bench.config.attention_dims(),
        latent_layout=layout,
        index_layout=index,
        page_size=16,
        phase="decode",
        is_deterministic=is_deterministic,
    )
    return bind_operators(need, [PROVIDER], "triton")[0]


def run(bench: Bench, requests: list[Request], ops: Operators) -> Tensor:
    """Hidden rows of the last tokens; the requests stay where they are."""
    bench.ops, model = ops, bench.model
    if ops.fusions:
        model.layers, plain = tuple(map(as_on_a_gpu, model.layers)), model.layers
    geometry = bench.geometry([(one, 1) for one in requests])
    hidden = bench.forward(geometry, requests).hidden.data.float()
    if ops.fusions:
        model.layers = plain
    return hidden


def launches(
    bench: Bench, requests: list[Request], kv_layout: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter[str], Tensor]:
    """Of the second layer, which has experts; and the hidden rows."""
    ops = operators(bench, kv_layout)
    counter = LaunchCounter(monkeypatch)
    ops.begin_layer = counter.begin_layer  # type: ignore[method-assign]  # where a layer begins
    with counter:
        hidden = run(bench, requests, ops)
    return counter.by_layer[1], hidden


@pytest.mark.parametrize("kv_layout", ["fp8", "auto"])
def test_a_moe_layer_launches_few_kernels(kv_layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = launches(*decoding(kv_layout), kv_layout, monkeypatch)
    shown = "\n".join(f"{count} {name}" for name, count in sorted(layer.items()))
    assert layer.total() <= 20, shown


def test_a_published_checkpoint_gets_every_fusion(tmp_path: Path) -> None:
    """The same launches as a random model, and the same numbers: nothing is left unjoined."""
    found = []
    for folder in (None, tmp_path):
        bench, requests = decoding("fp8", folder)
        with pytest.MonkeyPatch.context() as patch:
            found.append(launches(bench, requests, "fp8", patch))
        layer = bench.model.layers[1]
        assert len(layer.attention.inputs) == 1
        assert layer.indexer is not None
        assert layer.attention.between is layer.indexer.key
        assert layer.queries is not None
        assert isinstance(layer.feed_forward, MixtureOfExperts)
        assert layer.feed_forward.shared is None
    (kernels, random), (others, loaded) = found
    assert kernels == others
    torch.testing.assert_close(loaded, random, rtol=0, atol=0.05 * float(random.std()))


def test_fusions_compute_what_their_parts_do() -> None:
    bench, requests = decoding("fp8")
    ops = operators(bench, "fp8")
    assert {"heads_quantise", "index_products", "route_products"} <= ops.fusions.keys()
    plain = Operators(ops.kernels, ops.providers)
    found, expected = run(bench, requests, ops), run(bench, requests, plain)
    assert float((found - expected).abs().max()) < 0.05 * float(expected.std())


def test_equal_bits_are_not_left_to_fusions_that_count_rows() -> None:
    bench, _ = decoding("fp8")
    bound = operators(bench, "fp8", is_deterministic=True).fusions
    assert not PROVIDER.by_batch & bound.keys()
    assert "norm_quantise" in bound
