"""Loading: the values are those of the files, in the engine's dtype, read forwards and once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnomon.errors import CheckpointError
from gnomon.models import loading
from gnomon.models.checkpoint import read_checkpoint
from gnomon.models.config import BlockFp8, Family, ModelConfig
from gnomon.models.config_reading import read_config
from gnomon.models.load_plan import plan_load
from gnomon.models.loading import LoadProgress, load_model_params, load_planned
from gnomon.models.quantised import SCALE_SUFFIX, quantise_blocks
from tests.unit.models.checkpoint_folders import (
    assemble,
    small_shape,
    stored_tensors,
    tiny_config,
    write_folder,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kept_fp32(name: str) -> bool:
    return name.endswith(("router.weight", "router.bias", "indexer.weights_proj.weight"))


def assert_same(params: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Equal to the bit after one conversion to the engine's dtype."""
    assert params.keys() == expected.keys()
    for name, values in expected.items():
        own = torch.promote_types(dtype, torch.float32) if kept_fp32(name) else dtype
        assert params[name].dtype is own, name
        assert torch.equal(params[name], values.to(own)), name


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("engine", [*DTYPES, torch.float64])
def test_values_in_every_pair_of_dtypes(
    family: Family, stored: torch.dtype, engine: torch.dtype, tmp_path: Path
) -> None:
    config = tiny_config(family)
    tensors = stored_tensors(config, stored)
    write_folder(tmp_path, small_shape(family), tensors, num_shards=3)
    params = load_model_params(tmp_path, config, engine)
    assert_same(params, assemble(config, tensors), engine)


def test_staging_of_a_few_bytes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that end within matrices give the same values as whole ones."""
    config = tiny_config()
    tensors = stored_tensors(config, torch.bfloat16)
    write_folder(tmp_path, small_shape(), tensors)
    monkeypatch.setattr(loading, "STAGING_BYTES", 100)
    params = load_model_params(tmp_path, config, torch.float32)
    assert_same(params, assemble(config, tensors), torch.float32)


def stack_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other spelling: per-expert tensors replaced by two stacked ones a layer."""
    params = assemble(config, tensors)
    left = {key: value for key, value in tensors.items() if ".experts." not in key}
    for layer in range(config.num_hidden_layers):
        if config.mlp_layer_types[layer] == "sparse":
            prefix = f"model.layers.{layer}.mlp.experts."
            left[prefix + "gate_up_proj"] = params[f"layers.{layer}.experts.gate_up"]
            left[prefix + "down_proj"] = params[f"layers.{layer}.experts.down"]
    return left


@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16])
def test_stacked_experts_are_the_same_model(engine: torch.dtype, tmp_path: Path) -> None:
    config = tiny_config()
    tensors = stored_tensors(config)
    stacked = stack_experts(config, tensors)
    assert len(stacked) < len(tensors)
    write_folder(tmp_path, small_shape(), stacked)
    params = load_model_params(tmp_path, config, engine)
    assert_same(params, assemble(config, tensors), engine)


def by_loops(codes: Tensor, scales: Tensor, block: BlockFp8) -> Tensor:
    values = torch.empty(codes.shape)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            scale = scales[row // block.block_rows, column // block.block_columns]
            values[row, column] = codes[row, column].float() * scale
    return values


@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("staging", [4 << 20, 64])
def test_block_fp8_with_edge_blocks(
    engine: torch.dtype,
    scale_dtype: torch.dtype,
    staging: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every matrix of attention and experts has cut-off blocks of 8 × 8 here."""
    monkeypatch.setattr(loading, "STAGING_BYTES", staging)
    block = BlockFp8(8, 8, True, ())
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [8, 8],
    }
    shape = small_shape(quantization_config=quantization)
    config = read_config(shape)
    tensors = stored_tensors(config)
    dequantised = dict(tensors)
    for key, values in list(tensors.items()):
        if values.dim() == 2 and ("_proj" in key or "kv_a" in key) and "weights_proj" not in key:
            codes, scales = quantise_blocks(values, block)
            tensors[key], tensors[key + SCALE_SUFFIX] = codes, scales.to(scale_dtype)
            dequantised[key] = by_loops(codes, scales, block)
    write_folder(tmp_path, shape, tensors, num_shards=2)
    params = load_model_params(tmp_path, config, engine)
    assert_same(params, assemble(config, dequantised), engine)


def test_stacked_fp8_experts(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    shape = small_shape(quantization_config=quantization)
    config = read_config(shape)
    block = config.quantization
    assert block is not None
    tensors = stack_experts(config, stored_tensors(config))
    key = "model.layers.1.mlp.experts.gate_up_proj"
    codes, scales = quantise_blocks(tensors[key], block)
    tensors[key], tensors[key + SCALE_SUFFIX] = codes, scales
    write_folder(tmp_path, shape, tensors)
    params = load_model_params(tmp_path, config, torch.float32)
    for expert in range(config.n_routed_experts):
        expected = by_loops(codes[expert], scales[expert], block)
        assert torch.equal(params["layers.1.experts.gate_up"][expert], expected)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = stored_tensors(config)
    write_folder(tmp_path, small_shape(), tensors, num_shards=2)
    seen: list[LoadProgress] = []
    load_model_params(tmp_path, config, torch.float32, progress=seen.append)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert len(seen) == len(tensors)
    assert {event.bytes_total for event in seen} == {total}
    done = [event.bytes_done for event in seen]
    assert done == sorted(done)
    assert done[-1] == total
    names = [event.shard for event in seen]
    assert names == sorted(names)  # one shard after the other


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = stored_tensors(config)
    del tensors["lm_head.weight"]
    write_folder(tmp_path, small_shape(tie_word_embeddings=True), tensors)
    params = load_model_params(tmp_path, config, torch.float32)
    assert params["lm_head.weight"] is params["embed.weight"]


def test_nothing_is_allocated_for_a_checkpoint_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    tensors = stored_tensors(config)
    del tensors["model.norm.weight"]
    write_folder(tmp_path, small_shape(), tensors)

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("memory was taken before the names were matched")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_model_params(tmp_path, config, torch.float32)


def test_file_cut_off_after_its_header_was_read(tmp_path: Path) -> None:
    config = tiny_config()
    write_folder(tmp_path, small_shape(), stored_tensors(config))
    plan = plan_load(read_checkpoint(tmp_path), config)
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(CheckpointError, match="truncated"):
        load_planned(plan, torch.float32)


def test_values_too_large_for_float16(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = stored_tensors(config)
    tensors["model.norm.weight"][3] = 1e5
    write_folder(tmp_path, small_shape(), tensors)
    with pytest.raises(
        CheckpointError, match=r"'model\.norm\.weight' does not fit float16.*100000"
    ):
        load_model_params(tmp_path, config, torch.float16)
