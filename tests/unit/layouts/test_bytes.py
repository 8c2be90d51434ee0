"""Packed layouts byte for byte: golden files, hand-written tokens, and the exact definition."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, PlainLayout
from gnomon.errors import LayoutError
from tests.golden import definition

GOLDEN = Path(definition.__file__).parent
float32s = st.floats(width=32, min_value=-(2.0**126), max_value=2.0**126)


def golden(name: str, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray((GOLDEN / name).read_bytes()), dtype=dtype)


def as_bytes(rows: Tensor) -> bytes:
    return bytes(rows.flatten().tolist())


def test_the_files_are_what_the_definition_says() -> None:
    for name, content in definition.golden_files().items():
        assert (GOLDEN / name).read_bytes() == content, name


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Fp8LatentLayout(512, 64), "fp8_ds_mla_656"),
        (Fp8LatentLayout(512, 0, has_empty_rope_slot=True), "fp8_ds_mla_656_nope"),
        (Fp8LatentLayout(512, 0), "fp8_ds_mla_528"),
    ],
)
def test_latents_have_the_golden_bytes(layout: Fp8LatentLayout, name: str) -> None:
    assert layout.id == name
    values = golden("latents.f32", torch.float32).view(12, 576)[:, : layout.dim]
    assert as_bytes(layout.quantise(values)) == (GOLDEN / f"{name}.bin").read_bytes()
    pool = layout.allocate(3, 12)
    layout.write(pool, torch.arange(12, 24), values)
    assert as_bytes(pool.storage[1]) == (GOLDEN / f"{name}.bin").read_bytes()
    assert not pool.storage[0].any()
    assert not pool.storage[2].any()


def test_index_keys_have_the_golden_page() -> None:
    layout = Fp8IndexKeyLayout(128)
    pool = layout.allocate(3, 12)
    layout.write(pool, torch.arange(12, 24), golden("index_keys.f32", torch.float32).view(12, 128))
    assert as_bytes(pool.storage[1]) == (GOLDEN / "index_k_132_page12.bin").read_bytes()
    assert not pool.storage[0].any()
    assert not pool.storage[2].any()


def test_the_golden_page_reads_back_as_the_definition_says() -> None:
    """Decoding starts from the file, so an error that writer and reader share cannot hide."""
    content = (GOLDEN / "index_k_132_page12.bin").read_bytes()
    layout = Fp8IndexKeyLayout(128, read_dtype=torch.float64)
    pool = layout.allocate(2, 12)
    pool.storage[1] = golden("index_k_132_page12.bin", torch.uint8)
    keys = [list(row) for row in definition.golden_values(128, seed=132)]
    expected = [
        [float(definition.e4m3_value(content[t * 128 + i]) * definition.index_scale(keys[t]))
         for i in range(128)]
        for t in range(12)
    ]  # fmt: skip
    assert layout.gather(pool, torch.arange(12, 24)).tolist() == expected


def test_one_token_written_by_hand() -> None:
    """1.0 alone: amax / 448 lies in (2^-9, 2^-8], so scale 2^-8; 256 = 2^8 has code 0x78."""
    latent = torch.zeros(1, 576)
    latent[0, 0], latent[0, 511], latent[0, 512] = 1.0, -3.5, 1.0
    row = Fp8LatentLayout(512, 64).quantise(latent)[0].tolist()
    assert row[0] == 0x78
    assert row[511] == 0xFE  # -3.5 / 2^-7 = -448
    assert bytes(row[512:528]).hex() == "0000803b" + "00000039" * 2 + "0000003c"
    assert bytes(row[528:532]).hex() == "803f0000"
    assert not any(row[1:511] + row[532:])
    key = torch.zeros(1, 128)
    key[0, 5] = 1.0
    row = Fp8IndexKeyLayout(128).quantise(key)[0].tolist()
    assert row[5] == 0x78
    assert bytes(row[128:]).hex() == "0000803b"
    zero = Fp8IndexKeyLayout(128).quantise(torch.zeros(1, 128))[0].tolist()
    assert bytes(zero).hex() == "00" * 128 + "00008034"  # the floor, 2^-22


@given(st.lists(float32s, min_size=20, max_size=20))
def test_small_latents_equal_the_definition(values: list[float]) -> None:
    got = Fp8LatentLayout(12, 8).quantise(torch.tensor([values]))
    assert as_bytes(got) == definition.fp8_ds_mla_token(values[:12], values[12:])


@given(st.lists(float32s, min_size=12, max_size=12), st.integers(0, 255))
def test_grouped_latents_equal_the_definition(values: list[float], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    latent = torch.randn(256, generator=draw)
    latent[::25] = torch.tensor(values[:11])
    got = Fp8LatentLayout(256, 2).quantise(torch.cat((latent, torch.tensor(values[-2:])))[None])
    assert as_bytes(got) == definition.fp8_ds_mla_token(latent.tolist(), values[-2:])


@given(st.lists(st.lists(float32s, min_size=8, max_size=8), min_size=1, max_size=5))
def test_index_pages_equal_the_definition(keys: list[list[float]]) -> None:
    layout = Fp8IndexKeyLayout(8)
    pool = layout.allocate(2, len(keys))
    layout.write(pool, torch.arange(len(keys), 2 * len(keys)), torch.tensor(keys))
    assert as_bytes(pool.storage[1]) == definition.index_k_page(keys)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_faults_stay_where_they_are(bad: float) -> None:
    latent = torch.ones(1, 576)
    latent[0, 3] = latent[0, 570] = bad
    layout = Fp8LatentLayout(512, 64, read_dtype=torch.float32)
    rows = layout.quantise(latent)
    assert rows[0, 3].item() == 0x7F
    got = layout.dequantise(rows)[0]
    assert got[3].isnan()
    assert got[570].isnan() if math.isnan(bad) else got[570].item() == bad
    others = torch.ones(576, dtype=torch.bool)
    others[[3, 570]] = False
    assert got[others].tolist() == [1.0] * 574


def test_input_dtypes_round_to_float32_first() -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(5, 576, generator=draw, dtype=torch.float64)
    layout = Fp8LatentLayout(512, 64)
    assert layout.quantise(values).equal(layout.quantise(values.float()))
    narrow = values.bfloat16()
    assert layout.quantise(narrow).equal(layout.quantise(narrow.float()))


def test_split_gives_codes_and_scales() -> None:
    layout = Fp8IndexKeyLayout(32)
    keys = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    codes, scales = layout.split(layout.quantise(keys).view(2, 3, 36))
    assert codes.shape == (2, 3, 32)
    assert scales.shape == (2, 3)
    expected = [float(definition.index_scale(key)) for key in keys.tolist()]
    assert scales.flatten().tolist() == expected


def test_plain_bytes_are_the_numbers_in_order() -> None:
    row = PlainLayout(torch.bfloat16, 3).quantise(torch.tensor([[1.0, -2.0, 1.00390625]]))
    assert as_bytes(row).hex() == "803f" + "00c0" + "803f"  # the last one is a tie, to even


@pytest.mark.parametrize(
    "layout", [PlainLayout(torch.float32, 8), Fp8LatentLayout(8, 4), Fp8IndexKeyLayout(8)]
)
def test_bytes_of_another_width_are_refused(layout: PlainLayout) -> None:
    with pytest.raises(LayoutError, match="decodes uint8"):
        layout.dequantise(torch.zeros(2, layout.bytes_per_token + 4, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="decodes uint8"):
        layout.dequantise(torch.zeros(2, layout.bytes_per_token))
    with pytest.raises(LayoutError, match="encodes floats"):
        layout.quantise(torch.zeros(2, layout.dim + 1))
    with pytest.raises(LayoutError, match="encodes floats"):
        layout.quantise(torch.zeros(2, layout.dim, dtype=torch.int32))
