"""Memory plans: published sizes, bounds that hold whatever the context, refusals that say why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gnomon.engine.config import EngineConfig
from gnomon.engine.machine import (
    GIB,
    KNOWN_GPUS,
    Machine,
    known_gpu,
    probe_machine,
    require_new_enough,
    shortcomings,
)
from gnomon.engine.memory_plan import (
    GPU_BUDGET,
    StepSizes,
    graph_bytes,
    plan_memory,
    step_bytes,
    weight_bytes_of,
)
from gnomon.engine.resolve import resolve
from gnomon.errors import ConfigError
from gnomon.models.config_reading import read_config
from gnomon.models.params import param_dtype, param_specs
from gnomon.models.published_shapes import PUBLISHED, published_shape
from gnomon.models.quantised import may_stay_fp8
from gnomon.models.sources import parse_model_spec

V32 = read_config(published_shape("deepseek-v3.2"), {})
TINY = parse_model_spec("random:deepseek_v32,layers=2").config
SIZES = StepSizes(num_tokens=2048, num_seqs=256, max_len=131072)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_shapes_are_read_without_complaint(name):
    config = read_config(published_shape(name), {})
    assert config.index_topk == 2048
    assert published_shape(name) is not published_shape(name)
    assert published_shape("gpt-2") is None


def test_weights_of_deepseek_v32_are_671_billion_numbers_mostly_of_one_byte():
    num_params = sum(torch.Size(spec.shape).numel() for spec in param_specs(V32))
    assert 670e9 < num_params < 673e9  # the published 671B, and the indexers
    assert num_params < weight_bytes_of(V32, torch.bfloat16) < 1.02 * num_params


def test_weights_that_are_not_quantised_take_their_dtype():
    expected = sum(
        torch.Size(spec.shape).numel() * (4 if spec.keep_fp32 else 2) for spec in param_specs(TINY)
    )
    assert weight_bytes_of(TINY, torch.bfloat16) == expected


def test_fp8_weights_count_as_they_are_loaded():
    num_params = sum(torch.Size(spec.shape).numel() for spec in param_specs(V32))
    wide = weight_bytes_of(V32, torch.bfloat16, has_fp8=False)
    assert 2 * num_params <= wide < 2.01 * num_params
    edges = parse_model_spec("random:deepseek_v32,layers=1,fp8=true,hidden=160,q_rank=130").config
    held = weight_bytes_of(edges, torch.bfloat16)
    assert held == sum(_loaded_bytes(spec) for spec in param_specs(edges))


def _loaded_bytes(spec):
    """By plain loops over blocks; what is multiplied in other numbers keeps its own dtype."""
    if not may_stay_fp8(spec):
        return torch.Size(spec.shape).numel() * param_dtype(spec, torch.bfloat16).itemsize
    *others, rows, columns = spec.shape
    count = torch.Size(others).numel() if others else 1
    scales = sum(1 for _ in range(0, rows, 128) for _ in range(0, columns, 128))
    return count * (rows * columns + 4 * scales)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_ranks_divide_heads_experts_and_vocabulary_but_not_the_rest(num_ranks):
    whole = weight_bytes_of(V32, torch.bfloat16)
    one = weight_bytes_of(V32, torch.bfloat16, num_ranks)
    assert whole / num_ranks < one < whole / num_ranks + 10 * GIB
    assert step_bytes(V32, torch.bfloat16, SIZES, num_ranks) < step_bytes(
        V32, torch.bfloat16, SIZES, 1
    )


def test_a_million_tokens_of_context_take_no_more_for_scores_than_the_budget():
    short, long = (replace(SIZES, max_len=length) for length in (2048, 1 << 20))
    grown = step_bytes(V32, torch.bfloat16, long, 1) - step_bytes(V32, torch.bfloat16, short, 1)
    assert 0 <= grown <= 2 * GPU_BUDGET.score_bytes
    tables = 8 * SIZES.num_seqs * (1 << 20) // 64
    grown = graph_bytes(V32, torch.bfloat16, long, 1) - graph_bytes(V32, torch.bfloat16, short, 1)
    assert 0 < grown <= 2 * GPU_BUDGET.score_bytes + tables


def test_the_lines_and_the_cache_make_up_the_share_that_may_be_used():
    machine = replace(known_gpu("h200"), free_bytes=130 * GIB)
    plan = plan_memory(V32, torch.bfloat16, SIZES, machine, 0.8, num_ranks=8)
    assert plan.num_fixed + plan.cache_bytes == plan.limit_bytes == int(0.8 * machine.total_bytes)
    assert plan.lines[0].num_bytes == machine.total_bytes - 130 * GIB
    assert len(plan.shown()) == len(plan.lines) + 2


def test_what_does_not_fit_is_refused_with_the_table():
    with pytest.raises(ConfigError, match="does not fit h200") as caught:
        resolve(EngineConfig(), V32, known_gpu("h200"), weight_bytes_of(V32, torch.bfloat16))
    for word in ("weights", "graphs", "reserve", "gnomon plan"):
        assert word in str(caught.value)


def test_the_cache_takes_what_is_left_and_a_greater_wish_is_refused():
    gpu, config = known_gpu("h200"), EngineConfig(max_model_len=65536)
    weights = weight_bytes_of(V32, torch.bfloat16, 8)
    found = resolve(config, V32, gpu, weights, num_ranks=8)
    page = found.schema.bytes_per_page("tokens")
    assert found.memory.cache_bytes - page < found.num_pages["tokens"] * page
    assert found.num_pages["tokens"] * page <= found.memory.cache_bytes
    greedy = EngineConfig(kv_cache_memory="90GiB")
    with pytest.raises(ConfigError, match=r"kv_cache_memory is 90GiB, .* GiB are left of the GPU"):
        resolve(greedy, V32, gpu, weights, num_ranks=8)
    greedy = EngineConfig(num_kv_pages=100_000_000)
    with pytest.raises(ConfigError, match=r"num_kv_pages is 100000000, .* GiB are left of the GPU"):
        resolve(greedy, V32, gpu, weights, num_ranks=8)
    with pytest.raises(ConfigError, match=r"num_kv_pages is 100000000, .* left beside the weights"):
        resolve(greedy, TINY, Machine("cpu", 8 * GIB))


def test_a_cpu_has_no_plan():
    assert resolve(EngineConfig(), TINY, Machine("cpu", 8 * GIB)).memory is None


def test_gpus_by_name():
    assert known_gpu("H200").capability == (9, 0)
    with pytest.raises(ConfigError, match="Did you mean 'h100'"):
        known_gpu("h10")
    with pytest.raises(ConfigError, match="Did you mean 'a100-40' or 'a100-80'"):
        known_gpu("A100")
    with pytest.raises(ConfigError, match=r"gpu is ''; known are [^?]*$"):
        known_gpu("")
    for gpu in KNOWN_GPUS.values():
        require_new_enough(gpu)
    old = replace(known_gpu("h200"), name="Tesla T4", capability=(7, 5))
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5"):
        require_new_enough(old)


def test_no_cuda_is_said_in_torchs_own_words(monkeypatch):
    def old_driver() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nUpdate it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    with pytest.raises(ConfigError, match="driver on your system is too old"):
        probe_machine("cuda")
    assert probe_machine("auto").device == "cpu"


def test_a_gpu_that_is_passed_over_is_named(monkeypatch, tmp_path):
    """Under auto: too old a GPU, and a driver that torch cannot use."""
    t4 = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (15 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: t4)
    machine = probe_machine("auto")
    assert machine.device == "cpu"
    (said,) = shortcomings(machine)
    assert "the CPU is used: Tesla T4 has compute capability 7.5; gnomon needs 8.0" in said
    assert shortcomings(probe_machine("cpu")) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("gnomon.engine.machine._why_no_cuda", lambda: "the driver is too old")
    monkeypatch.setattr("gnomon.engine.machine.DRIVER", tmp_path)
    (said,) = shortcomings(probe_machine("auto"))
    assert "torch finds no CUDA device (the driver is too old)" in said
    monkeypatch.setattr("gnomon.engine.machine.DRIVER", tmp_path / "none")
    assert shortcomings(probe_machine("auto")) == []


def test_what_a_machine_lacks_is_said_with_what_is_used_instead(monkeypatch, tmp_path):
    monkeypatch.setattr("gnomon.engine.machine.cuda_home", lambda: None)
    said = " ".join(shortcomings(known_gpu("a100-80")))
    for word in ("nvcc", "FP8"):
        assert word in said
    monkeypatch.setattr("gnomon.engine.machine.cuda_home", lambda: tmp_path)
    assert shortcomings(known_gpu("h200")) == []
