"""Weights that stay in FP8: which, what they hold, and that a model computes with them what it
computes with the numbers that they stand for, but for the rounding of activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.attention.ops.operators import Operators
from gnomon.errors import ConfigError
from gnomon.models.anchor_shapes import ANCHORS
from gnomon.models.checkpoint import read_checkpoint
from gnomon.models.config import BlockFp8
from gnomon.models.config_reading import read_config
from gnomon.models.feed_forward import MixtureOfExperts
from gnomon.models.linear import Linear, SharedInput, dequantised, stacked
from gnomon.models.load_plan import plan_load
from gnomon.models.loading import load_model_params, load_planned
from gnomon.models.params import param_specs
from gnomon.models.published_shapes import FP8
from gnomon.models.quantised import SCALE_SUFFIX, keeps_fp8, may_stay_fp8, quantise_blocks
from gnomon.models.random_model import random_params, random_weights
from gnomon.models.registry import build_model
from gnomon.models.sources import open_model, parse_model_spec
from tests.laws.bugs.tiny import Bench, t0_spec, token_list
from tests.unit.models.checkpoint_folders import small_shape, stored_tensors, write_folder
from tests.unit.ops.build_step import operators

BLOCK = BlockFp8(128, 128, True, ())
WIDE = {"hidden": 256, "moe_intermediate_size": 128, "q_rank": 128, "fp8": "true"}


def weight(rows: int, columns: int, seed: int = 0) -> BlockFp8Weight:
    generator = torch.Generator().manual_seed(seed)
    codes, scales = quantise_blocks(torch.randn(rows, columns, generator=generator), BLOCK)
    return BlockFp8Weight(codes, scales, is_power_of_two=True)


def test_rows_that_fp8_holds_are_multiplied_exactly() -> None:
    """No activation rounding: the product of the dequantised weight, whatever the edges."""
    ops, layer = operators(), Linear(weight(200, 300))
    x = weight(5, 300, seed=1)
    rows = dequantised(x, torch.float32)
    expected = F.linear(rows, dequantised(layer.weight, torch.float32))
    torch.testing.assert_close(layer(rows, ops), expected, rtol=1e-5, atol=1e-3)
    assert layer(rows[:0], ops).shape == (0, 200)


def test_rows_are_quantised_once_for_all_that_read_them() -> None:
    plain, calls = operators(), []

    def counted(*arguments: object) -> object:
        calls.append(1)
        return plain.kernels["quantise_rows"](*arguments)

    ops = Operators({**plain.kernels, "quantise_rows": counted})
    x = SharedInput(torch.randn(3, 128), ops)
    outputs = [Linear(weight(130, 128, seed))(x, ops) for seed in range(3)]
    Linear(torch.ones(4, 128))(x, ops)
    assert len(calls) == 1
    assert all(out.shape == (3, 130) for out in outputs)


@pytest.mark.parametrize(
    ("q_rank", "index_dim", "is_joined", "between"),
    [("128", "128", True, "indexer.wk"), ("128", "64", True, None), ("96", "128", False, None)],
    ids=["all three", "keys end within a block", "query latents do"],
)
def test_layers_over_a_blocks_input_become_one(
    q_rank: str, index_dim: str, is_joined: bool, between: str | None
) -> None:
    """Nothing is copied, and attention and the indexer get what they get of each by itself."""
    fields = WIDE | {"q_rank": q_rank, "index_dim": index_dim, "layers": "1"}
    spec = "random:deepseek_v32," + ",".join(f"{key}={value}" for key, value in fields.items())
    config = parse_model_spec(spec).config
    params = random_weights(config, 0, torch.float32, has_fp8=True)
    layer = build_model(config, params, 64).layers[0]
    assert layer.indexer is not None
    names = ("attn.q_a", *((between,) if between else ()), "attn.kv_a")
    parts = [Linear.of(params, f"layers.0.{name}") for name in names]
    assert (len(layer.attention.inputs) == 1) == is_joined
    assert layer.attention.between is (layer.indexer.key if between else None)
    if not is_joined:
        assert [one.weight for one in layer.attention.inputs] == [one.weight for one in parts]
        return
    (whole,), first = layer.attention.inputs, parts[0].weight
    assert isinstance(whole.weight, BlockFp8Weight)
    assert isinstance(first, BlockFp8Weight)
    assert whole.weight.codes.data_ptr() == first.codes.data_ptr()
    ops, x = operators(), torch.randn(4, 256)
    assert torch.equal(whole(x, ops), torch.cat([part(x, ops) for part in parts], -1))


@pytest.mark.parametrize("layers", ["layers=1,dense_layers=1", "layers=1,dense_layers=0"])
def test_a_model_computes_what_its_dequantised_twin_does(layers: str) -> None:
    """Each product's rows are off by 2 % of their size; choices of experts may flip in a row."""
    fields = WIDE | dict(setting.split("=") for setting in layers.split(",")) | {"topk": 64}
    plain, coded = (Bench(fields=fields, dtype=torch.float32) for _ in range(2))
    params = random_weights(coded.config, 0, torch.float32, has_fp8=True)
    assert sum(isinstance(value, BlockFp8Weight) for value in params.values()) >= 6
    coded.model = build_model(coded.config, params, 4096)
    tokens = token_list(40)
    rows = [torch.stack(list(b.prefill([b.request("a", tokens)]).values())) for b in (plain, coded)]
    errors = (rows[0] - rows[1]).norm(dim=1) / rows[0].norm(dim=1)
    assert 1e-4 < float(errors.median()) < 0.06
    assert float(errors.quantile(0.8)) < 0.12


def test_a_checkpoints_codes_are_kept_as_they_are(tmp_path: Path) -> None:
    """All linear layers but kv_b; the numbers are those of the dequantised load."""
    shape = small_shape(
        hidden_size=256, moe_intermediate_size=128, intermediate_size=200, quantization_config=FP8
    )
    config = read_config(shape)
    assert config.quantization is not None
    tensors = stored_tensors(config)
    for key, values in list(tensors.items()):
        if values.dim() == 2 and ("_proj" in key or "kv_a" in key) and "weights_proj" not in key:
            tensors[key], tensors[key + SCALE_SUFFIX] = quantise_blocks(values, config.quantization)
    write_folder(tmp_path, shape, tensors, num_shards=2)
    plain = load_model_params(tmp_path, config, torch.float32)
    plan = plan_load(read_checkpoint(tmp_path), config)
    kept = load_planned(plan, torch.float32, has_fp8=True)
    coded = {name for name, value in kept.items() if isinstance(value, BlockFp8Weight)}
    for name, value in kept.items():
        assert torch.equal(dequantised(value, torch.float32), plain[name]), name
    assert {"layers.0.attn.q_a.weight", "layers.0.attn.o.weight"} <= coded
    assert "layers.0.attn.kv_b.weight" not in coded, "absorption needs its parts"
    assert "layers.0.mlp.gate_up.weight" not in coded, "the up rows begin inside a block"
    assert "layers.0.mlp.down.weight" in coded, "an edge block is no obstacle"
    assert {f"layers.1.experts.{part}" for part in ("gate_up", "down")} <= coded
    stored = tensors["model.layers.0.self_attn.o_proj.weight"]
    held = kept["layers.0.attn.o.weight"]
    assert isinstance(held, BlockFp8Weight)
    assert torch.equal(held.codes.view(torch.uint8), stored.view(torch.uint8))


def test_experts_stay_fp8_together_or_not_at_all(tmp_path: Path) -> None:
    shape = small_shape(hidden_size=256, moe_intermediate_size=128, quantization_config=FP8)
    config = read_config(shape)
    assert config.quantization is not None
    tensors = stored_tensors(config)
    for key in [key for key in tensors if ".experts." in key and "down_proj" in key]:
        codes, scales = quantise_blocks(tensors[key], config.quantization)
        tensors[key], tensors[key + SCALE_SUFFIX] = codes, scales
    write_folder(tmp_path, shape, tensors)
    kept = load_planned(plan_load(read_checkpoint(tmp_path), config), torch.float32, has_fp8=True)
    assert not any(isinstance(value, BlockFp8Weight) for value in kept.values())


def test_the_shared_expert_is_one_of_the_experts_where_it_is_as_wide() -> None:
    """Its weights lie behind theirs: the mixture has E + 1 experts, none copied."""
    spec = "random:deepseek_v32,fp8=true,layers=1,dense_layers=0"
    config = parse_model_spec(spec).config
    params = random_weights(config, 0, torch.float32, has_fp8=True)
    block = build_model(config, params, 64).layers[0].feed_forward
    assert isinstance(block, MixtureOfExperts)
    assert block.shared is None
    assert block.rule.shared_expert == config.n_routed_experts == block.down.shape[0] - 1
    one = params["layers.0.shared.down.weight"]
    assert isinstance(one, BlockFp8Weight)
    assert isinstance(block.down, BlockFp8Weight)
    assert block.down.codes[-1].data_ptr() == one.codes.data_ptr()
    assert torch.equal(block.down.scales[-1], one.scales)
    two = parse_model_spec(f"{spec},n_shared_experts=2").config
    wide = build_model(two, random_weights(two, 0, torch.float32, has_fp8=True), 64)
    assert wide.layers[0].feed_forward.shared is not None


def test_random_codes_are_those_of_the_dequantised_model() -> None:
    spec = "random:glm_moe_dsa,fp8=true,layers=3,dense_layers=1"
    config = parse_model_spec(spec).config
    kept = random_weights(config, 4, torch.float32, has_fp8=True)
    plain = random_params(config, 4, torch.float32)
    rough = random_params(parse_model_spec(spec.replace("true", "false")).config, 4, torch.float32)
    for name, value in kept.items():
        assert torch.equal(dequantised(value, torch.float32), plain[name]), name
        spread = float(plain[name].std() / rough[name].std())
        assert abs(spread - 1) < 0.02, name
    assert isinstance(kept["layers.2.experts.down"], BlockFp8Weight)
    for name in ("indexer.wk", "attn.kv_b"):
        assert not torch.equal(plain[f"layers.0.{name}.weight"], rough[f"layers.0.{name}.weight"])
    for name in ("indexer.weights_proj", "router"):
        assert torch.equal(plain[f"layers.2.{name}.weight"], rough[f"layers.2.{name}.weight"])


@pytest.mark.parametrize("name", sorted(ANCHORS))
def test_anchor_models_are_fp8_throughout(name: str) -> None:
    """Real widths: every matrix that vLLM holds in FP8 can stay so; nothing is allocated."""
    source = parse_model_spec(f"random:{name},layers=2", default_vocab_size=77)
    config = source.config
    assert config.vocab_size > 10_000
    assert config.quantization == BlockFp8(128, 128, False, ())
    assert [config.is_dense_layer(layer) for layer in range(2)] == [True, False]
    held = {spec.name.split(".", 2)[-1] for spec in param_specs(config) if may_stay_fp8(spec)}
    assert held == {
        *(f"attn.{part}.weight" for part in ("q_a", "q_b", "kv_a", "o")),
        *(f"indexer.{part}.weight" for part in ("wq_b", "wk")),
        *(f"{block}.{part}.weight" for block in ("mlp", "shared") for part in ("gate_up", "down")),
        *(f"experts.{part}" for part in ("gate_up", "down")),
    }


def test_where_codes_stay() -> None:
    ok, odd = BlockFp8(128, 128, False, ()), BlockFp8(64, 128, False, ())
    assert keeps_fp8("auto", ok, "cuda", (9, 0))
    assert keeps_fp8("auto", ok, "cuda", (12, 0))
    assert keeps_fp8("auto", ok, "cuda", (8, 9))
    assert not keeps_fp8("auto", ok, "cuda", (8, 0))
    assert keeps_fp8("fp8", ok, "cuda", (8, 0))
    assert not keeps_fp8("auto", ok, "cpu", None)
    assert not keeps_fp8("auto", odd, "cuda", (9, 0))
    assert not keeps_fp8("auto", None, "cuda", (9, 0))
    assert not keeps_fp8("dequantise", ok, "cuda", (9, 0))
    assert keeps_fp8("fp8", ok, "cpu", None)
    for block in (None, odd):
        with pytest.raises(ConfigError, match="needs a model with FP8 weights in blocks of 128"):
            keeps_fp8("fp8", block, "cpu", None)


def test_fp8_of_a_random_model_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="fp8 is 'yes'; allowed: true or false"):
        parse_model_spec("random:deepseek_v32,fp8=yes")
    with pytest.raises(ConfigError, match=r"no family 'h12'.*h128"):
        parse_model_spec("random:h12")


def test_an_opened_model_holds_codes_where_asked() -> None:
    source = parse_model_spec("random:deepseek_v32,layers=1,dense_layers=0,fp8=true")
    opened = open_model(source, has_fp8=True).model.layers[0].feed_forward
    assert isinstance(opened.gate_up, BlockFp8Weight)
    plain = open_model(source).model.layers[0].feed_forward
    assert isinstance(plain.gate_up, torch.Tensor)


@pytest.mark.parametrize("nope_dim", ["56", "40"])
def test_queries_of_one_input_lie_one_behind_the_other(nope_dim: str) -> None:
    """As one weight they are the two, block by block; 48 rows a head end no block: apart."""
    spec = t0_spec("T0", **WIDE, nope_dim=nope_dim, heads="2", index_dim="20")
    config = parse_model_spec(spec).config
    params, plain = (
        random_weights(config, 0, torch.float32, has_fp8=True),
        random_params(config, 0, torch.float32),
    )
    q_b, wq_b = (Linear.of(params, f"layers.0.{n}") for n in ("attn.q_b", "indexer.wq_b"))
    for layer, name in ((q_b, "attn.q_b"), (wq_b, "indexer.wq_b")):
        expected = plain[f"layers.0.{name}.weight"]
        assert torch.equal(dequantised(layer.weight, torch.float32), expected)
    both = stacked(q_b, wq_b)
    if nope_dim == "40":
        assert both is None
        return
    assert both is not None
    expected = torch.cat([dequantised(one.weight, torch.float32) for one in (q_b, wq_b)])
    assert torch.equal(dequantised(both.weight, torch.float32), expected)
    assert isinstance(both.weight, BlockFp8Weight)
    assert isinstance(q_b.weight, BlockFp8Weight)
    assert both.weight.codes.data_ptr() == q_b.weight.codes.data_ptr()
    assert stacked(wq_b, q_b) is None


def test_plain_queries_stay_apart() -> None:
    assert stacked(Linear(torch.ones(4, 4)), Linear(weight(128, 128))) is None
    assert stacked(Linear(weight(128, 128)), Linear(weight(128, 128))) is None
