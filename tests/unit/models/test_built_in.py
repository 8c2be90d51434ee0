"""The models that ship are in the wheel, whole, and small enough; each has a name for users."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from gnomon.errors import ConfigError
from gnomon.models.built_in import BUILT_IN_NAMES, built_in_folder, folder_of
from gnomon.models.sources import parse_model_spec

ROOT = Path(__file__).parents[3]
NEEDED = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "MODEL_CARD.md",
}
MB = 1_000_000


def test_the_wheel_holds_the_models(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    [built] = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    size = 0
    with zipfile.ZipFile(built) as archive:
        for name in BUILT_IN_NAMES:
            folder = built_in_folder(name)
            assert {path.name for path in folder.iterdir()} >= NEEDED
            for path in folder.iterdir():
                assert archive.read(f"gnomon/assets/{name}/{path.name}") == path.read_bytes()
                size += path.stat().st_size
    assert sum(path.stat().st_size for path in built_in_folder().iterdir()) <= 12 * MB
    assert size <= 24 * MB


def test_a_user_names_a_model_in_three_ways() -> None:
    assert folder_of(None) == built_in_folder() == folder_of("builtin:tiny")
    assert folder_of("builtin:tiny_glm").name == "tiny_glm"
    assert folder_of("~/models/x") == Path.home() / "models" / "x"
    assert folder_of(Path("models/x")) == Path("models/x")


@pytest.mark.parametrize(
    ("spec", "family"), [("builtin:tiny", "deepseek_v32"), ("builtin:tiny_glm", "glm_moe_dsa")]
)
def test_a_built_in_model_is_opened_by_its_name(spec: str, family: str) -> None:
    source = parse_model_spec(spec)
    assert source.config.model_type == family
    assert source.label == spec.removeprefix("builtin:")
    assert parse_model_spec(spec, overrides={"index_topk": 5}).config.index_topk == 5


@pytest.mark.parametrize("name", ["", "small", "../tiny", "tiny/"])
def test_a_name_that_does_not_ship_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(ConfigError, match=r"builtin:tiny, builtin:tiny_glm") as found:
        parse_model_spec(f"builtin:{name}")
    assert f"'builtin:{name}'" in str(found.value)
