"""Names of layouts: what each means for each part, and what is refused."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.layouts import HOST_OPERATIONS, IndexKeyDims, LatentDims, Operation
from gnomon.attention.layouts.registry import FOREIGN_SPELLINGS, candidates, choose_layout
from gnomon.errors import ConfigError

LATENT = LatentDims(512, 64)
NOPE = LatentDims(512, 0)
TINY = LatentDims(64, 16)
KEY = IndexKeyDims(128)
TINY_KEY = IndexKeyDims(32)


@pytest.mark.parametrize(
    ("name", "dims", "dtype", "expected"),
    [
        ("auto", LATENT, torch.bfloat16, "bf16_576"),
        ("auto", NOPE, torch.bfloat16, "bf16_512"),
        ("auto", TINY, torch.float32, "fp32_80"),
        ("auto", KEY, torch.float16, "fp16_128"),
        ("auto", TINY_KEY, torch.float64, "fp64_32"),
        ("bfloat16", TINY, torch.float32, "bf16_80"),
        ("float32", KEY, torch.bfloat16, "fp32_128"),
        ("fp8", LATENT, torch.bfloat16, "fp8_ds_mla_656"),
        ("fp8_e4m3", LATENT, torch.bfloat16, "fp8_ds_mla_656"),
        ("fp8_ds_mla", LATENT, torch.bfloat16, "fp8_ds_mla_656"),
        ("fp8_ds_mla_656", LATENT, torch.bfloat16, "fp8_ds_mla_656"),
        ("fp8", NOPE, torch.bfloat16, "fp8_ds_mla_656_nope"),
        ("fp8_ds_mla_528", NOPE, torch.bfloat16, "fp8_ds_mla_528"),
        ("fp8", TINY, torch.float32, "fp8_ds_mla_100_c64_r16"),
        ("fp8", LatentDims(64, 0), torch.float32, "fp8_ds_mla_196_c64_r0_nope"),
        ("fp8_ds_mla_68_c64_r0", LatentDims(64, 0), torch.float32, "fp8_ds_mla_68_c64_r0"),
        ("fp8", KEY, torch.bfloat16, "index_k_132"),
        ("index_k_132", KEY, torch.bfloat16, "index_k_132"),
        ("index_k_36", TINY_KEY, torch.float32, "index_k_36"),
        ("bf16_576", LATENT, torch.bfloat16, "bf16_576"),
    ],
)
def test_what_a_name_means(
    name: str, dims: LatentDims | IndexKeyDims, dtype: torch.dtype, expected: str
) -> None:
    layout = choose_layout(name, dims, dtype)
    assert layout.id == expected
    assert layout.computed_dtype == dtype
    values = torch.ones(2, layout.dim, dtype=dtype)
    assert layout.dequantise(layout.quantise(values)).equal(values)


@pytest.mark.parametrize("name", [*FOREIGN_SPELLINGS, "bf16", "fp8_ds_mla_528", "bf16_512", ""])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not available.*Allowed: auto.*fp8_ds_mla_656"):
        choose_layout(name, LATENT, torch.bfloat16)


def test_a_name_of_another_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"index_head_dim=128.*index_k_132"):
        choose_layout("fp8_ds_mla_656", KEY, torch.bfloat16)
    with pytest.raises(ConfigError, match="kv_lora_rank=512"):
        choose_layout("index_k_132", LATENT, torch.bfloat16)


def test_widths_that_fp8_cannot_hold() -> None:
    with pytest.raises(ConfigError, match=r"kv_lora_rank 192"):
        choose_layout("fp8", LatentDims(192, 16), torch.bfloat16)
    assert choose_layout("auto", LatentDims(192, 16), torch.bfloat16).id == "bf16_208"
    with pytest.raises(ConfigError, match="index_head_dim 6"):
        choose_layout("fp8", IndexKeyDims(6), torch.bfloat16)


def test_a_dtype_that_no_layout_stores() -> None:
    with pytest.raises(ConfigError, match=r"no plain cache layout stores torch.float8_e5m2"):
        choose_layout("auto", LATENT, torch.float8_e5m2)


def test_a_lacking_operation_is_refused_with_those_that_have_it() -> None:
    needs = HOST_OPERATIONS | {Operation.TYPED_VIEW}
    assert choose_layout("auto", LATENT, torch.bfloat16, needs).id == "bf16_576"
    with pytest.raises(ConfigError, match=r"fp8_ds_mla_656 has no operation typed_view.*bf16_576"):
        choose_layout("fp8", LATENT, torch.bfloat16, needs)
    with pytest.raises(ConfigError, match=r"fp64_576 has no operation device_load.*bf16_576"):
        choose_layout("float64", LATENT, torch.bfloat16, {Operation.DEVICE_LOAD})


@pytest.mark.parametrize("dims", [LATENT, NOPE, TINY, KEY, TINY_KEY])
def test_every_candidate_answers_to_its_own_id(dims: LatentDims | IndexKeyDims) -> None:
    found = candidates(dims, torch.float32)
    assert len({layout.id for layout in found}) == len(found)
    for layout in found:
        assert choose_layout(layout.id, dims, torch.float32) == layout
