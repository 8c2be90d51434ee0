"""Matching names: each stored tensor is used once or is a known extra; else the load stops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnomon.errors import CheckpointError
from gnomon.models.checkpoint import read_checkpoint
from gnomon.models.config import Family
from gnomon.models.config_reading import read_config
from gnomon.models.load_plan import LoadPlan, extras_summary, plan_load
from tests.unit.models.checkpoint_folders import (
    small_shape,
    stored_tensors,
    tiny_config,
    write_folder,
)

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def plan(
    folder: Path, tensors: dict[str, Tensor], shape: dict[str, object] | None = None
) -> LoadPlan:
    shape = small_shape() if shape is None else shape
    write_folder(folder, shape, tensors, num_shards=2)
    return plan_load(read_checkpoint(folder), read_config(folder))


def refusal(
    folder: Path, tensors: dict[str, Tensor], shape: dict[str, object] | None = None
) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan(folder, tensors, shape)
    return str(caught.value)


def test_every_stored_tensor_is_used_exactly_once(tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    made = plan(tmp_path, tensors)
    assert sorted(fill.source.key for fill in made.fills) == sorted(tensors)
    assert made.extras == ()
    assert made.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    places = [(fill.stored.path.name, fill.stored.start) for fill in made.fills]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "key", ["lm_head.weight", EXPERT, "model.layers.0.self_attn.indexer.k_norm.bias"]
)
def test_missing(key: str, tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    shape = [*tensors.pop(key).shape]
    assert f"{key}: expected shape {shape}, found nothing" in refusal(tmp_path, tensors)


def test_missing_router_bias_is_not_made_up(tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert "e_score_correction_bias: expected shape [4], found nothing" in refusal(
        tmp_path, tensors
    )


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.0.self_attn.q_a_proj.bias",
        "model.layers.0.self_attn.q_a_proj.weight_scale_inv",
        "model.layers.0.self_attn.indexer.wq_b.weight_packed",
        "vision.patch.weight",
    ],
)
def test_unexpected(key: str, tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config()) | {key: torch.zeros(2, 3)}
    assert f"{key}: expected no such tensor in 3 layers, found F32 [2, 3] in model-" in refusal(
        tmp_path, tensors
    )


def test_misshapen(tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    tensors[EXPERT] = tensors[EXPERT].T.contiguous()
    assert f"{EXPERT}: expected shape [12, 16], found F32 [16, 12]" in refusal(tmp_path, tensors)


def test_config_of_another_size(tmp_path: Path) -> None:
    message = refusal(tmp_path, stored_tensors(tiny_config()), small_shape(num_hidden_layers=2))
    assert "expected no such tensor in 2 layers, found F32 [" in message
    assert "model.layers.2." in message
    assert "more" in message  # all of them are counted, a few are shown
    assert len(message) < 2500


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e5m2, torch.bool])
def test_dtypes_that_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    tensors[EXPERT] = torch.zeros(12, 16).to(dtype)
    message = refusal(tmp_path, tensors)
    assert f"{EXPERT}: expected dtype F32 or F16 or BF16 or F64 or F8_E4M3" in message


def fp8_shape() -> dict[str, object]:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
    return small_shape(quantization_config=quantization)


def with_codes(scale: Tensor | None) -> dict[str, Tensor]:
    tensors = stored_tensors(tiny_config())
    tensors[EXPERT] = tensors[EXPERT].to(torch.float8_e4m3fn)
    return tensors if scale is None else tensors | {EXPERT + "_scale_inv": scale}


def test_codes_with_their_scales(tmp_path: Path) -> None:
    made = plan(tmp_path, with_codes(torch.ones(2, 2)), fp8_shape())
    fill = next(fill for fill in made.fills if fill.source.key == EXPERT)
    assert fill.scales is not None
    assert fill.scales.key == EXPERT + "_scale_inv"


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (None, "found nothing"),
        (torch.ones(2, 3), "found F32 [2, 3]"),
        (torch.ones(1), "found F32 [1]"),
        (torch.ones(2, 2, dtype=torch.int32), "found I32 [2, 2]"),
    ],
)
def test_codes_with_wrong_scales(scale: Tensor | None, found: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, with_codes(scale), fp8_shape())
    assert f"{EXPERT}_scale_inv: expected" in message
    assert "[2, 2]" in message
    assert found in message


def test_codes_that_the_config_does_not_announce(tmp_path: Path) -> None:
    assert "no quantization_config" in refusal(tmp_path, with_codes(torch.ones(2, 2)))


def test_vector_of_codes(tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    assert "model.norm.weight: expected dtype" in refusal(tmp_path, tensors, fp8_shape())


def test_known_extras_are_told_with_their_reasons(tmp_path: Path) -> None:
    shape = small_shape(Family.GLM_MOE_DSA, index_topk_pattern="FSF", tie_word_embeddings=True)
    tensors = stored_tensors(read_config(shape))
    extras = {
        "model.layers.1.self_attn.indexer.wk.weight": "shares another layer's selection",
        "model.layers.1.self_attn.indexer.k_norm.bias": "shares another layer's selection",
        "model.layers.3.eh_proj.weight": "MTP",
        "model.layers.3.self_attn.q_a_proj.weight": "MTP",
        "model.layers.3.shared_head.head.weight": "MTP",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "rotary",
        "model.rotary_emb.inv_freq": "rotary",
    }
    made = plan(tmp_path, tensors | {key: torch.zeros(5, 7) for key in extras}, shape)
    told = {extra.key: extra.reason for extra in made.extras}
    assert told.keys() == extras.keys() | {"lm_head.weight"}
    for key, reason in extras.items():
        assert reason in told[key]
    assert "tied" in told["lm_head.weight"]
    counts = sorted(line.split(":")[0] for line in extras_summary(made.extras))
    assert counts == [f"{count} tensors not loaded" for count in (1, 2, 2, 3)]


def test_layer_past_the_end_is_mtp_only_with_its_projection(tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    tensors["model.layers.3.enorm.weight"] = torch.zeros(16)
    message = refusal(tmp_path, tensors, small_shape(num_nextn_predict_layers=1))
    assert "model.layers.3.enorm.weight: expected no such tensor" in message


def test_index_weights_of_a_full_layer_are_never_extra(tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    tensors["model.layers.0.self_attn.indexer.extra.weight"] = torch.zeros(1)
    assert "indexer.extra.weight: expected no such tensor" in refusal(tmp_path, tensors)


def test_both_spellings_of_the_experts_at_once(tmp_path: Path) -> None:
    tensors = stored_tensors(tiny_config())
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(4, 24, 16)
    message = refusal(tmp_path, tensors)
    assert "model.layers.1.mlp.experts.0.gate_proj.weight: expected no such tensor" in message
