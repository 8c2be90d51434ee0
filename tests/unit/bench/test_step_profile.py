"""One layer out of a list of kernels: where it begins, what its classes are; and peers' files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.bench import step_report
from gnomon.bench.ceilings import Ceilings
from gnomon.bench.step import StepCell, StepResult
from gnomon.bench.step_profile import CLASSES, EXPERTS, OTHER, Run, classes_of, summed
from gnomon.bench.timing import Timing

LAYER = (
    "prepare_attention_kernel",
    "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u>(unsigned int)",
    "topk_kernel",
    "void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<...>",
    "nvjet_sm90_tst_256x64_64x5_2x1_v_bz_NNT",
    "multiply",
    "route_kernel",
    "sort_few",
    "multiply",
    "multiply",
    "add_shares",
    "norm_quantise_kernel",
)
KINDS = [
    OTHER, "index scores", "top-k", "attention", "other products", "FP8 linears", "experts' rest",
    "experts' rest", EXPERTS, EXPERTS, "experts' rest", OTHER,
]  # fmt: skip
PEERS = sorted((Path(__file__).parents[3] / "bench" / "peers").glob("*.json"))


def runs_of(names: tuple[str, ...], begin: float = 0.0) -> list[Run]:
    """Each takes 2 us, and 1 us passes to the next."""
    return [Run(name, begin + 3.0 * i, begin + 3.0 * i + 2.0) for i, name in enumerate(names)]


def test_names_have_classes() -> None:
    assert classes_of(runs_of(LAYER)) == KINDS


def test_experts_end_with_the_norm_where_it_adds_their_shares() -> None:
    names = ("sort_few", "multiply", "multiply", "norm_quantise_kernel", "multiply")
    expected = ["experts' rest", EXPERTS, EXPERTS, OTHER, "FP8 linears"]
    assert classes_of(runs_of(names)) == expected


def test_a_norm_may_sum_the_shares() -> None:
    names = ("sort_few", "multiply", "multiply", "norm_quantise_kernel", "multiply")
    kinds = ["experts' rest", EXPERTS, EXPERTS, OTHER, "FP8 linears"]
    assert classes_of(runs_of(names)) == kinds


def test_a_grouped_product_is_the_experts_wherever_it_stands() -> None:
    grouped = runs_of(("void deep_gemm::sm90_m_grouped_fp8_gemm<...>", "fp8_gemm_1d2d"))
    assert classes_of(grouped) == [EXPERTS, "FP8 linears"]


def test_one_layer_is_the_mean_of_those_between_the_second_mark_and_the_last() -> None:
    dense = ("embed", "prepare_attention_kernel", "multiply")
    found = summed(runs_of((*dense, *LAYER, *LAYER, *LAYER)))
    layer = found.layer
    assert layer is not None
    assert layer.num_layers == 2
    assert layer.span_us == 3.0 * len(LAYER)
    assert layer.classes[EXPERTS] == 4.0
    assert layer.counts == {kind: KINDS.count(kind) for kind in set(KINDS)}
    assert sum(kernel.count for kernel in found.kernels) == len(dense) + 3 * len(LAYER)
    assert found.kernels[0].name == "multiply"


def test_a_step_of_one_layer_has_none_to_show() -> None:
    assert summed(runs_of(LAYER)).layer is None


def test_a_layer_is_shown_beside_the_peers(tmp_path: Path) -> None:
    path = tmp_path / "peer.json"
    path.write_text(
        json.dumps(
            {
                "milliseconds": {"decode 2x40": 3.0},
                "copy_gb_s": 4.0,
                "matmul_tflop_s": 1.0,
                "layer_us": {"decode 2x40": {"experts": 5.0, "span": 50.0}},
            }
        )
    )
    timing = Timing(3600.0, 3600.0, 3600.0, 1)
    layer = summed(runs_of((*LAYER, *LAYER, *LAYER))).layer
    result = StepResult(StepCell("decode", 2, 40), timing, timing, None, layer=layer)
    ceilings = Ceilings(copy_bytes_s=2e9, matmul_flop_s=1e12, fp8_matmul_flop_s=None)
    lines = step_report.layer_lines(result, step_report.Peer(path), ceilings)
    experts = next(line for line in lines if line.startswith("    experts "))
    assert experts.split() == ["experts", "4.0", "2", "10"]
    assert lines[-1].split() == ["span", "36.0", "12", "100"]
    whole = step_report.as_json([result], step_report.Peer(path), ceilings, {})
    assert whole["steps"][0]["peer_layer_us"]["span"] == 100.0


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.stem)
def test_every_peer_file_is_read_and_knows_the_classes(path: Path) -> None:
    step_report.Peer(path)
    known = {EXPERTS, OTHER, step_report.SPAN, *(kind for kind, _ in CLASSES)}
    layers = json.loads(path.read_text())["layer_us"]
    assert "decode 64x8192" in layers
    for layer in layers.values():
        assert set(layer) == known
        assert sum(layer.values()) - layer["span"] == pytest.approx(layer["span"], rel=0.1)


def test_the_peers_are_those_that_were_measured() -> None:
    assert [path.stem for path in PEERS] == [
        "vllm_glm_fp8", "vllm_h128_bf16", "vllm_h128_fp8", "vllm_h16tp8_bf16", "vllm_h16tp8_fp8",
    ]  # fmt: skip
