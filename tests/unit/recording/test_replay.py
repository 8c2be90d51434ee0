"""Replay: equal through the provider that ran, within tolerance through the reference, and a
planted mistake is found where it was planted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.providers.reference import PROVIDER as REFERENCE
from gnomon.attention.providers.torch import PROVIDER as TORCH
from gnomon.attention.recording_replay import replay
from gnomon.attention.recording_report import as_json, by_operator, describe
from gnomon.errors import UnsupportedError
from tests.unit.recording.recorded import PROMPTS, calls_of, load, shifted, with_kernel

EVERY_OP = {
    "rms_norm",
    "rope",
    "latent_write",
    "index_prepare",
    "index_scores",
    "topk",
    "sparse_mla",
    "context_gather",
    "moe",
}


def test_a_step_has_every_operator_and_nothing_withheld(prefill):
    assert {call.op for call in prefill.calls} == EVERY_OP | {"dense_mha"}
    assert not [call for call in prefill.calls if call.withheld or call.error]
    assert {call.layer for call in prefill.calls} == {0, 1, 2}
    assert {call.part for _, call in calls_of(prefill, "sparse_mla")} == {
        f"layers.{layer}.latent" for layer in range(3)
    }


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_the_provider_that_ran_gives_the_same_bits(step, request):
    report = replay(request.getfixturevalue(step), TORCH)
    assert report.first is None
    assert report.geometry_fault == ""
    assert [call.op for call in report.calls if not call.comparison.is_equal] == []
    assert report.num_run == len(report.calls)


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_the_reference_agrees_within_the_tolerance(step, request):
    recording = request.getfixturevalue(step)
    report = replay(recording, REFERENCE)
    assert report.first is None
    shares = {one.op: one.share for one in by_operator(report)}
    assert shares["topk"] == shares["context_gather"] == 0
    assert 0 < max(shares.values()) < 0.5  # other arithmetic, so not all bits; but close


@pytest.mark.parametrize(
    "flags",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float64"},
        {"kv_layout": "fp8", "model": "random:deepseek_v32,layers=2,kv_lora_rank=128"},
        {"kv_layout": "bfloat16", "model": "random:glm_moe_dsa,layers=4"},
    ],
    ids=lambda flags: "-".join(str(value) for value in flags.values()),
)
def test_other_dtypes_layouts_and_models(tmp_path, flags):
    for recording in load(tmp_path / "own", **flags):
        assert all(call.comparison.is_equal for call in replay(recording, TORCH).calls)
        assert replay(recording, REFERENCE).first is None


@pytest.mark.parametrize(
    ("op", "place", "by", "has_head"),
    [
        ("rms_norm", (3, 5), 1e-3, False),
        ("rope", (3, 2, 1), 1e-3, True),
        ("index_prepare", (3, 2, 1), 1e-3, True),
        ("index_scores", (3, 5), 1e-3, False),
        ("topk", (3, 0), 1, False),
        ("sparse_mla", (3, 2, 1), 1e-3, True),
        ("dense_mha", (3, 2, 1), 1e-3, True),
        ("context_gather", (3, 5), 1e-6, False),
        ("moe", (3, 5), 1e-3, False),
    ],
)
def test_a_planted_mistake_is_found_where_it_is(prefill, op, place, by, has_head):
    report = replay(prefill, shifted(op, place, by))
    first = report.first
    assert first is not None
    number, call = calls_of(prefill, op)[0]
    assert (first.number, first.op, first.layer) == (number, op, call.layer)
    found = first.comparison.first
    assert found.index == place
    assert found.row == 3
    assert found.head == (2 if has_head else None)
    assert found.difference == pytest.approx(by, rel=0.1)  # float32 near 1
    assert found.allowed < found.difference
    assert {one.op for one in by_operator(report) if one.num_differing} == {op}


def test_the_sentence_names_operator_layer_request_position_and_head(prefill):
    """Row 5 of the sparse rows: position 5 of the first prompt."""
    report = replay(prefill, shifted("sparse_mla", (5, 2, 7), 0.01))
    words = describe(report.first, prefill)
    assert words.startswith("sparse_mla, layer 0, row 5 (request 'first', position 5), head 2 ")
    assert "out[5, 2, 7] is" in words
    assert "fp32 sums of unit scale" in words
    facts = as_json(report, prefill)
    assert facts["is_equal"] is False
    assert facts["first"]["request"] == "'first'"
    assert (facts["first"]["step_row"], facts["first"]["position"]) == (5, 5)
    assert facts["operators"]["sparse_mla"]["differing"] == 3


def test_dense_rows_are_named_as_rows_of_the_step(prefill):
    """Only the second prompt is dense: its row 3 stands behind the first prompt's rows."""
    report = replay(prefill, shifted("dense_mha", (3, 2, 1), 0.01))
    found = report.first.comparison.first
    assert found.row == 3
    assert found.step_row == len(PROMPTS["first"]) + 3


@pytest.mark.parametrize("op", ["latent_write", "index_prepare"])
def test_a_writer_that_misses_a_row_or_hits_another_is_found(prefill, op):
    def forgets_row_4(*arguments):
        slots = arguments[5].clone()
        slots[4] = -1
        return TORCH.kernels[op](*arguments[:5], slots)

    first = replay(prefill, with_kernel(op, forgets_row_4)).first
    assert (first.op, first.layer, first.comparison.first.row) == (op, 0, 4)
    assert first.comparison.first.name == "written"

    def writes_the_null_page(*arguments):
        result = TORCH.kernels[op](*arguments)
        arguments[4].storage[0, :4] = 1
        return result

    first = replay(prefill, with_kernel(op, writes_the_null_page)).first
    assert (first.op, first.layer) == (op, 0)
    assert "offset 0 of page 0 was written" in first.comparison.first.note


def test_a_kernel_that_raises_or_returns_another_shape_is_a_difference(prefill):
    def raises(*_):
        raise ZeroDivisionError("no rows today")

    first = replay(prefill, with_kernel("rope", raises)).first
    assert first.op == "rope"
    assert "raised ZeroDivisionError: no rows today" in describe(first, prefill)

    def narrows(*arguments):
        return TORCH.kernels["rope"](*arguments)[..., :-1]

    first = replay(prefill, with_kernel("rope", narrows)).first
    assert "recorded is torch.float32" in first.comparison.first.note


def test_nan_and_infinity_are_differences_unless_both_have_them(prefill):
    first = replay(prefill, shifted("moe", (3, 5), math.nan)).first
    assert first.op == "moe"
    assert math.isinf(first.comparison.first.difference)
    _, call = calls_of(prefill, "moe")[0]
    same = replace(call, results={"out": call.results["out"].clone().fill_(math.nan)})

    def all_nan(*arguments):
        return torch.full_like(arguments[0], math.nan)

    recording = replace(prefill, calls=(same,))
    assert replay(recording, with_kernel("moe", all_nan)).first is None


def test_a_provider_of_one_operator_runs_that_one(prefill):
    only = KernelSet("mine", 1, {"topk": TORCH.kernels["topk"]})
    report = replay(prefill, only)
    assert report.num_run == len(calls_of(prefill, "topk"))
    assert any("mine has no kernel for rope" in why for why in report.skipped)


def test_a_provider_of_nothing_is_refused_with_the_reasons(prefill):
    with pytest.raises(UnsupportedError, match=r"can run no call.*has no kernel for moe"):
        replay(prefill, KernelSet("empty", 1, {}))


def test_a_call_that_raised_is_compared_with_the_reference(prefill):
    _, call = calls_of(prefill, "sparse_mla")[1]
    failed = replace(call, results=None, error="RuntimeError: out of luck")
    recording = replace(prefill, calls=(failed,))
    report = replay(recording, TORCH)
    assert report.first is None
    assert report.calls[0].recorded_error == "RuntimeError: out of luck"
    assert replay(recording, shifted("sparse_mla", (0, 0, 0), 1e-2)).first is not None


def test_a_recorded_lie_is_found_by_the_reference(tmp_path, prefill):
    """What the engine's own provider got wrong shows when the truth is replayed."""
    number, call = calls_of(prefill, "sparse_mla")[1]
    lie = call.results["out"].clone()
    lie[7, 3] *= 1.5
    told = replace(call, results={**call.results, "out": lie})
    calls = (*prefill.calls[:number], told, *prefill.calls[number + 1 :])
    first = replay(replace(prefill, calls=calls), REFERENCE).first
    assert (first.number, first.layer) == (number, 1)
    assert (first.comparison.first.row, first.comparison.first.head) == (7, 3)
