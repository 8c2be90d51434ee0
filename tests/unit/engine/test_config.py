"""Flags of the engine: types, ranges, names; and what they become for a model on a machine."""

from __future__ import annotations

import pytest
import torch

from gnomon.engine.captured_rows import DEFAULT_ROWS
from gnomon.engine.config import EngineConfig, Flag, check_flags, flag_specs, parse_bytes
from gnomon.engine.machine import GIB, Machine, known_gpu
from gnomon.engine.resolve import resolve
from gnomon.engine.step_rules import MIN_DENSE_ROWS, batch_rules
from gnomon.errors import ConfigError
from gnomon.models.config import ModelConfig
from gnomon.models.sources import parse_model_spec

LAPTOP = Machine("cpu", free_bytes=8 * GIB)


def tiny(**fields) -> ModelConfig:
    return parse_model_spec("random:deepseek_v32,layers=2", overrides=fields).config


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"max_model_length": 5}, "'max_model_len'"),
        ({"dtype": "float23"}, "'float32'"),
        ({"device": "tpu"}, "auto, cpu, cuda"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_seqs": True}, "of type int"),
        ({"max_num_seqs": 2.0}, "of type int"),
        ({"block_size": None}, "block_size"),
        ({"seed": -1}, "at least 0"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s"),
        ({"gpu_memory_utilization": 1.5}, "between 0.05 and 1.0"),
        ({"tensor_parallel_size": 2}, "one device"),
        ({"data_parallel_size": 4}, "one device"),
        ({"enable_expert_parallel": True}, "several devices"),
        ({"hf_overrides": "x=1"}, "of type dict"),
        ({"hf_overrides": {"torch_dtype": object()}}, "JSON"),
    ],
)
def test_a_bad_flag_is_named(flags, named):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**flags)
    assert named in str(caught.value)
    assert next(iter(flags)) in str(caught.value)


def test_every_field_is_a_flag_with_help():
    specs = flag_specs(EngineConfig)
    config = EngineConfig()
    spellings = [spelling for spec in specs for spelling in spec.spellings]
    assert len(spellings) == len(set(spellings))
    for spec in specs:
        assert len(spec.help) > 10
        assert spec.spellings[0] == "--" + spec.name.replace("_", "-")
        assert getattr(config, spec.name) == spec.default
        assert spec.type in (str, int, float, bool, dict)
    check_flags(config)
    assert config.given() == {}
    assert EngineConfig.of(dtype="float32", seed=0).given() == {"dtype": "float32"}
    assert Flag("help").choices == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("2.5gb", 2_500_000_000),
        ("1e6", 1_000_000),
        ("77", 77),
        ("9b", 9),
    ],
)
def test_sizes_in_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "four", "inf", "nan", "0", "4 parsecs"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        parse_bytes(text)


def test_defaults_come_from_model_and_machine():
    resolved = resolve(EngineConfig(), tiny(torch_dtype="bfloat16"), LAPTOP)
    assert resolved.dtype is torch.bfloat16
    assert resolved.fields["dtype"].source == "model"
    assert resolved.fields["device"].value == "cpu"
    assert resolved.max_model_len == tiny().max_position_embeddings
    assert resolved.fields["max_model_len"].source == "model"
    assert set(resolved.fields) == {spec.name for spec in flag_specs(EngineConfig)}
    needed = resolved.max_num_seqs * -(-resolved.max_model_len // 64) + 1
    assert 2 <= resolved.num_pages["tokens"] <= needed


def test_given_values_are_kept_and_marked():
    config = EngineConfig.of(dtype="float32", max_model_len=256, max_num_seqs=3, num_kv_pages=9)
    resolved = resolve(config, tiny(), LAPTOP)
    assert (resolved.max_model_len, resolved.max_num_seqs) == (256, 3)
    assert resolved.num_pages == {"tokens": 9}
    for name in ("dtype", "max_model_len", "max_num_seqs", "num_kv_pages"):
        assert resolved.fields[name].source == "flag"


def test_an_unstated_context_yields_to_the_cache():
    resolved = resolve(EngineConfig.of(num_kv_pages=5), tiny(), LAPTOP)
    assert resolved.max_model_len == 4 * 64
    assert "num_kv_pages" in resolved.fields["max_model_len"].reason


def test_the_byte_budget_bounds_the_pages():
    page_bytes = resolve(EngineConfig(), tiny(), LAPTOP).schema.bytes_per_page("tokens")
    resolved = resolve(EngineConfig.of(kv_cache_memory=10 * page_bytes + 5), tiny(), LAPTOP)
    assert resolved.num_pages == {"tokens": 10}
    assert resolved.max_model_len == 9 * 64


@pytest.mark.parametrize(
    ("flags", "fields", "named"),
    [
        ({"max_model_len": 10**6}, {}, "max_position_embeddings"),
        ({"max_model_len": 512, "num_kv_pages": 4}, {}, "512 tokens needs 9 cache pages"),
        ({"kv_cache_memory": "1KiB"}, {}, "kv-cache-memory"),
        ({"gpu_memory_utilization": 0.5}, {}, "kv_cache_memory"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, {}, "max_num_batched_tokens is 32"),
        ({"kv_layout": "fp7"}, {}, "fp7"),
    ],
)
def test_wishes_that_do_not_fit_are_refused(flags, fields, named):
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig.of(**flags), tiny(**fields), LAPTOP)
    assert named in str(caught.value)


def test_step_limits_follow_each_other():
    small = resolve(EngineConfig.of(max_num_batched_tokens=32), tiny(), LAPTOP)
    assert (small.max_num_seqs, small.max_num_batched_tokens) == (32, 32)
    large = resolve(EngineConfig.of(max_num_seqs=4000, num_kv_pages=99), tiny(), LAPTOP)
    assert (large.max_num_seqs, large.max_num_batched_tokens) == (4000, 4000)


def test_index_keys_follow_the_kind_of_the_latents():
    plain = resolve(EngineConfig.of(kv_layout="bfloat16", dtype="float32"), tiny(), LAPTOP)
    assert plain.latent_layout.stored_dtype is torch.bfloat16
    assert plain.index_layout.stored_dtype is torch.bfloat16
    assert plain.latent_layout.computed_dtype is torch.float32


H200 = Machine("cuda", free_bytes=138 * GIB, total_bytes=140 * GIB)


@pytest.mark.parametrize(
    ("machine", "dtype", "flags", "index"),
    [
        (LAPTOP, "bfloat16", {}, "bf16_32"),
        (H200, "bfloat16", {}, "index_k_36"),  # as trained, whatever the latents are
        (H200, "float32", {}, "fp32_32"),
        (H200, "bfloat16", {"index_layout": "bfloat16"}, "bf16_32"),
        (LAPTOP, "float32", {"index_layout": "fp8"}, "index_k_36"),
    ],
)
def test_index_keys_have_a_format_of_their_own(machine, dtype, flags, index):
    model = tiny(index_head_dim=32, index_n_heads=16)
    found = resolve(EngineConfig.of(dtype=dtype, **flags), model, machine)
    assert found.index_layout.id == index
    assert found.latent_layout.id.startswith(("bf16", "fp32"))


def test_an_index_layout_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="nvfp4"):
        resolve(EngineConfig.of(index_layout="nvfp4"), tiny(), LAPTOP)


def test_weights_that_do_not_fit_are_named_as_the_cause():
    with pytest.raises(ConfigError, match=r"the weights take 9\.0 GiB and 8\.0 GiB"):
        resolve(EngineConfig(), tiny(), LAPTOP, weight_bytes=9 * GIB)


@pytest.mark.parametrize(
    ("machine", "flags", "named"),
    [
        (LAPTOP, {}, "no CUDA graphs on device cpu"),
        (known_gpu("h200"), {"enforce_eager": True}, "enforce_eager is on"),
        (known_gpu("h200"), {"max_num_batched_tokens": 99}, "no step has more"),
    ],
)
def test_a_wish_for_captured_prefill_is_honoured_or_refused(machine, flags, named):
    with pytest.raises(ConfigError, match=named):
        resolve(EngineConfig.of(max_captured_prefill_tokens=100, **flags), tiny(), machine)
    off = resolve(EngineConfig.of(max_captured_prefill_tokens=0, **flags), tiny(), machine)
    assert off.max_captured_prefill_tokens == 0
    on = resolve(EngineConfig.of(max_captured_prefill_tokens=100), tiny(), known_gpu("h200"))
    assert on.max_captured_prefill_tokens == 100
    assert on.memory is not None
    assert "prefill, up to 100 tokens" in "\n".join(on.memory.shown())


def test_by_default_a_step_no_longer_than_allowed_is_captured():
    few = resolve(EngineConfig.of(max_num_batched_tokens=300), tiny(), known_gpu("h200"))
    assert few.max_captured_prefill_tokens == min(DEFAULT_ROWS, 300)
    assert resolve(EngineConfig(), tiny(), LAPTOP).max_captured_prefill_tokens == 0


def test_on_a_gpu_few_rows_of_a_request_are_attended_sparsely():
    for machine, least in ((LAPTOP, 0), (H200, MIN_DENSE_ROWS)):
        model = tiny()
        resolved = resolve(EngineConfig(), model, machine)
        rules = batch_rules(resolved, model.attention_dims(), (), has_graphs=False)
        assert rules.policy.min_dense_rows == least
