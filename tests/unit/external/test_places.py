"""Where libraries are looked for, and what is said where they are not."""

from __future__ import annotations

import io
import lzma
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gnomon.attention.dispatch import OpNeed, Verdict
from gnomon.attention.providers.external import external_providers, places
from gnomon.attention.providers.external.flashmla import FILE, OPERATORS
from gnomon.attention.providers.external.places import Places, cuda_home, unpacked
from gnomon.attention.providers.external.provider import ExternalProvider
from gnomon.attention.routes import AttentionDims
from gnomon.errors import ConfigError, UnsupportedError

V32 = AttentionDims(16, 512, 128, 64, 128, 2048, 64, 128)
HOPPER = OpNeed(
    device="cuda",
    dtype=torch.bfloat16,
    dims=V32,
    latent_layout="bf16_576",
    index_layout="index_k_132",
    page_size=64,
    capability=(9, 0),
)
NAME = "gnomon_test_library"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "gnomon" / "providers"
    sys.modules.pop(NAME, None)


def archive_of(folder: Path, text: str) -> Path:
    """A package NAME with one line of code, as a .tar.xz in ``folder``."""
    path = folder / f"{NAME}-cp312.tar.xz"
    with tarfile.open(path, "w:xz") as packed:
        entry = tarfile.TarInfo(f"{NAME}/__init__.py")
        entry.size = len(text)
        packed.addfile(entry, io.BytesIO(text.encode()))
    return path


def test_compressed_files_are_unpacked_once(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "a.so.xz").write_bytes(lzma.compress(b"machine code"))
    found = Places(str(tmp_path)).file("a.so")
    assert found is not None
    assert found.read_bytes() == b"machine code"
    assert own_cache in found.parents
    found.write_bytes(b"kept")
    assert Places(str(tmp_path)).file("a.so") == found
    assert found.read_bytes() == b"kept", "it was there already"
    (tmp_path / "a.so.xz").write_bytes(lzma.compress(b"another build"))
    other = Places(str(tmp_path)).file("a.so")
    assert other is not None
    assert other.read_bytes() == b"another build"
    (tmp_path / "a.so").write_bytes(b"plain")
    assert Places(str(tmp_path)).file("a.so") == tmp_path / "a.so"
    assert Places(str(tmp_path)).file("b.so") is None
    assert not [p for p in own_cache.iterdir() if p.name.startswith("tmp")], "scratch is removed"


def test_a_damaged_archive_is_said_to_be(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "a.so.xz").write_bytes(lzma.compress(b"x" * 10_000)[:40])
    with pytest.raises(UnsupportedError, match=r"a\.so\.xz cannot be unpacked"):
        unpacked(tmp_path / "a.so.xz")
    assert list(own_cache.iterdir()) == []


def test_packages_come_out_of_a_folder_or_an_archive(tmp_path: Path) -> None:
    archive_of(tmp_path, "value = 7")
    module = Places(str(tmp_path)).module(NAME)
    assert module is not None
    assert module.value == 7
    assert Places(str(tmp_path)).module(NAME) is module, "imported once"
    assert Places(None).module("gnomon_no_such_library") is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError('libcuda.so.1: no such file')", r"libcuda\.so\.1"),
        ("raise ValueError('another torch')", "another torch"),
        ("int('x')", "invalid literal"),
        ("def (", "invalid syntax"),
        ("{}['key']", "key"),
        ("import sys; sys.exit(3)", "3"),
        ("class Own(Exception): pass\nraise Own", "Own"),
    ],
)
def test_a_package_that_fails_to_import_says_why(tmp_path: Path, code: str, reason: str) -> None:
    archive_of(tmp_path, code)
    with pytest.raises(UnsupportedError, match=rf"{NAME} cannot be imported: .*{reason}"):
        Places(str(tmp_path)).module(NAME)
    assert NAME not in sys.modules


def test_a_package_has_to_have_what_is_called_of_it(tmp_path: Path) -> None:
    archive_of(tmp_path, "import types; part = types.SimpleNamespace(one=1); two = 2")
    places = Places(str(tmp_path))
    assert places.has_module(NAME)
    assert not places.has_module("gnomon_no_such_library")
    assert places.module(NAME, ("part.one", "two")) is not None
    with pytest.raises(UnsupportedError, match=rf"{NAME} .*has no part\.three, four; a version"):
        places.module(NAME, ("two", "part.three", "four"))


def test_a_library_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "_flashmla_C.abi3.so").write_text("not a library")
    with pytest.raises(UnsupportedError, match=r"_flashmla_C\.abi3\.so cannot be loaded: .*short"):
        Places(str(tmp_path)).operators(FILE, "_flashmla_C", OPERATORS)
    assert Places(None).operators(FILE, "_flashmla_C", OPERATORS) is None
    refused = {p.name: p for p in external_providers(str(tmp_path))}["flashmla"]
    verdict = refused.supports("sparse_mla", HOPPER)
    assert "cannot be loaded" in verdict.reason
    assert not verdict.is_ok


def test_a_folder_that_is_none_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"provider_path is .*it has to be a folder"):
        external_providers(str(tmp_path / "nowhere"))
    (tmp_path / "libz.so").touch()
    with pytest.raises(ConfigError, match=r"nothing is in it .*_flashmla_C\.abi3\.so.*deep_gemm"):
        external_providers(str(tmp_path))
    (tmp_path / "_vllm_fa3_C.abi3.so.xz").touch()
    assert len(external_providers(str(tmp_path))) == 4


@pytest.mark.parametrize(
    ("name", "op", "reason"),
    [
        ("flashmla", "sparse_mla", r"not installed; pip install .*FlashMLA.*--provider-path DIR"),
        ("fa3", "sparse_mla", r"not installed; pip install .*flash-attention.*--provider-path"),
        ("fa3", "dense_mha", r"not installed; pip install .*flash-attention.*--provider-path"),
        ("deepgemm", "index_scores", r"not installed; pip install .*DeepGEMM.*--provider-path"),
        ("flashinfer", "sparse_mla", "not installed; pip install flashinfer-python"),
    ],
)
def test_a_library_that_is_not_here_says_how_to_get_it(
    name: str, op: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    provider = {p.name: p for p in external_providers()}[name]
    verdict = provider.supports(op, HOPPER)
    assert not verdict.is_ok
    assert re.search(reason, verdict.reason), verdict.reason
    with pytest.raises(UnsupportedError, match=f"provider '{name}'"):
        provider.kernel(op, HOPPER)


def test_deepgemm_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cuda_home([None, str(tmp_path)]) is None
    where = "gnomon.attention.providers.external.deepgemm_library.cuda_home"
    monkeypatch.setattr(where, lambda: None)
    assert (
        "not installed"
        in {p.name: p for p in external_providers()}["deepgemm"]
        .supports("index_scores", HOPPER)
        .reason
    )
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text("raise ValueError('it was imported')")
    provider = {p.name: p for p in external_providers(str(tmp_path))}["deepgemm"]
    assert "nvcc" in provider.supports("index_scores", HOPPER).reason
    assert "CUDA_HOME" in provider.supports("index_scores", HOPPER).reason


def changed(**values: object) -> OpNeed:
    fields = {name: getattr(HOPPER, name) for name in HOPPER.__dataclass_fields__}
    return OpNeed(**{**fields, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "op", "need", "reason"),
    [
        ("flashmla", "sparse_mla", changed(device="cpu"), "runs on cuda, not on cpu"),
        (
            "flashmla",
            "sparse_mla",
            changed(capability=(8, 0)),
            "is built for sm_9x, sm_10x, this GPU is sm_80",
        ),
        (
            "fa3",
            "sparse_mla",
            changed(latent_layout="fp8_ds_mla_656"),
            "reads layouts bf16_576, fp16_576, not fp8_ds_mla_656",
        ),
        (
            "flashmla",
            "sparse_mla",
            changed(dims=AttentionDims(8, 64, 16, 32, 16, 64, 16, 32)),
            "needs (kv_lora_rank, qk_rope_head_dim) of (512, 64), not (64, 32)",
        ),
        (
            "flashmla",
            "sparse_mla",
            changed(dims=AttentionDims(129, 512, 128, 64, 128, 2048, 64, 128)),
            "needs num_heads of 1..128, not 129",
        ),
        ("deepgemm", "index_scores_paged", changed(page_size=32), "needs page_size of 64, not 32"),
        (
            "deepgemm",
            "index_scores",
            changed(index_layout="bf16_128"),
            "reads layouts index_k_132, not bf16_128",
        ),
        ("flashinfer", "sparse_mla", changed(is_graph=True), "cannot run inside a captured graph"),
        (
            "fa3",
            "dense_mha",
            changed(is_deterministic=True),
            "has row bits that hang on the batch in torch.bfloat16",
        ),
    ],
)
def test_requirements_are_said_before_a_library_is_looked_for(
    name: str, op: str, need: OpNeed, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("the library was looked for")

    for method in ("operators", "module"):
        monkeypatch.setattr(places.Places, method, touched)
    provider = {p.name: p for p in external_providers()}[name]
    assert provider.supports(op, need) == Verdict(False, reason)


def test_the_library_is_looked_for_once() -> None:
    calls = []

    def load() -> dict[str, object]:
        calls.append(1)
        raise UnsupportedError("gone")

    provider = ExternalProvider("x", 1, external_requirements(), load)  # type: ignore[arg-type]
    for _ in range(2):
        assert provider.supports("sparse_mla", HOPPER).reason == "gone"
    assert calls == [1]
    assert not provider.supports("rope", HOPPER).has_kernel
    assert provider.fusion("lazy_scores", HOPPER) is None


def external_requirements() -> object:
    from gnomon.attention.providers.external.flashmla import REQUIREMENTS

    return REQUIREMENTS
