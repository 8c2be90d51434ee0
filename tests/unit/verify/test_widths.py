"""Random models take the widths that a layout needs, and keep those that the user gave."""

from __future__ import annotations

import pytest

from gnomon.errors import ConfigError
from gnomon.verify.context import Context
from gnomon.verify.settings import VerifySettings
from gnomon.verify.widths import widths_for

PUBLISHED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_packed_layouts_get_published_widths(family: str) -> None:
    assert widths_for(f"random:{family}", {}, "fp8_ds_mla_656") == PUBLISHED
    assert widths_for(f"random:{family},layers=2", {}, "bf16_576") == PUBLISHED
    context = Context(VerifySettings.of(model=f"random:{family}", kv_layout="fp8_ds_mla_656"))
    resolved = context.survey().resolved
    assert (resolved.latent_layout.id, resolved.index_layout.id) == (
        "fp8_ds_mla_656",
        "index_k_132",
    )


@pytest.mark.parametrize("layout", ["auto", "bfloat16", "fp8", "fp8_ds_mla", "fp32_80"])
def test_layouts_that_fit_change_nothing(layout: str) -> None:
    assert widths_for("random:deepseek_v32", {}, layout) == {}


def test_a_folder_is_as_wide_as_it_is() -> None:
    for layout in ("fp8_ds_mla_656", "bf16"):
        assert widths_for(None, {}, layout) == widths_for("/a/folder", {}, layout) == {}


def test_what_the_user_gave_stays() -> None:
    assert widths_for("random:deepseek_v32,kv_rank=128", {}, "fp8_ds_mla_656") == {}
    assert widths_for("random:deepseek_v32", {"index_head_dim": 64}, "fp8_ds_mla_656") == {}
    settings = VerifySettings.of(
        model="random:deepseek_v32,kv_rank=128", kv_layout="fp8_ds_mla_656"
    )
    with pytest.raises(ConfigError, match="'fp8_ds_mla_656' is not available"):
        Context(settings).survey()


def test_layouts_of_models_without_rope_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'fp8_ds_mla_528' is not available"):
        Context(VerifySettings.of(kv_layout="fp8_ds_mla_528")).survey()


def test_unknown_layouts_are_left_to_the_engine() -> None:
    assert widths_for("random:deepseek_v32", {}, "fp8_ds_mla_657") == {}
    with pytest.raises(ConfigError, match="'fp8_ds_mla_657' is not available"):
        Context(VerifySettings.of(kv_layout="fp8_ds_mla_657")).survey()
