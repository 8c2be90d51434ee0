"""Checked mode on sound kernels: nothing is found, nothing of a live row is changed.

Also: which layers are sampled, what OFF costs, whose rows a chunk's rows are, faults of callers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.checked import CheckedOperators, CheckLevel, StepChecker, layers_to_check
from gnomon.attention.checks.effort import TURNS, pick_rows, spread
from gnomon.attention.checks.faults import Rule
from gnomon.attention.checks.inspector import Inspector
from gnomon.attention.checks.kernel import CheckedKernel
from gnomon.attention.dispatch import OPERATORS
from gnomon.attention.geometry import RowTensor
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.providers import builtin_providers
from gnomon.attention.spec import SPECS, Scale
from gnomon.errors import GeometryError, NumericsError
from tests.unit.checked.steps import NUM_LIVE, TORCH, Bench
from tests.unit.ops.build_step import operators

LEVELS = (CheckLevel.SAMPLED, CheckLevel.FULL)
CALLS = (
    "rms_norm", "layer_norm", "rope", "latent_write", "index_prepare", "index_select",
    "sparse_mla", "dense_mha", "lse_merge", "context_gather", "moe",
)  # fmt: skip


def tensors(result: Any) -> list[torch.Tensor]:
    """Every tensor that an operator returned."""
    if result is None:
        return []
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, RowTensor):
        return [result.data]
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in tensors(part)]
    if hasattr(result, "keys"):  # a selection
        (segment,) = result.keys.segments
        return [segment.ids, segment.count, result.margin, result.nan_rows]
    return [result.out.data, result.lse.data]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", CALLS)
def test_sound_kernels_pass_and_live_rows_keep_their_bits(op: str, level: CheckLevel) -> None:
    checked, plain = Bench(level=level), Bench(level=CheckLevel.OFF)
    found, expected = tensors(checked.run(op)), tensors(plain.run(op))
    for one, other in zip(found, expected, strict=True):
        live = slice(0, NUM_LIVE) if op != "context_gather" else slice(None)
        assert torch.equal(one[live].nan_to_num(7.0), other[live].nan_to_num(7.0))
        assert one.shape == other.shape
        assert not one.isnan().any()
    for name in ("latents", "index_keys"):
        assert torch.equal(getattr(checked.step, name).storage, getattr(plain.step, name).storage)
    assert checked.checker.num_checks > 0
    assert checked.checker.violations() == ()
    assert plain.checker.num_checks == 0


def behind_null_page(arguments: Any) -> Any:
    """The same call with a page before all others: the spec draws slots of page 0 too."""
    q, q_rope, pool, slots, count, scale = arguments
    storage = torch.cat((pool.storage.new_zeros(1, pool.storage.shape[1]), pool.storage))
    moved = torch.where(slots >= 0, slots + pool.page_size, -1)
    return q, q_rope, PagedPool(pool.layout, storage, pool.page_size), moved, count, scale


@pytest.mark.parametrize("is_thorough", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("provider", builtin_providers(), ids=lambda provider: provider.name)
def test_every_case_of_every_spec_passes(
    provider: Any, dtype: torch.dtype, is_thorough: bool
) -> None:
    """No false alarm on the specs' own edge cases, NaN beside the keys and in scores included."""
    inspector = Inspector(is_thorough)
    inspector.begin_step(None, (), None)
    for op in OPERATORS:
        kernel = CheckedKernel(op, provider.kernel(op), provider.name, inspector)
        cases = SPECS[op].cases(torch.Generator().manual_seed(5), dtype, Scale())
        for case in cases:
            kernel(*(behind_null_page(case.arguments) if op == "sparse_mla" else case.arguments))
    assert inspector.num_violations == 0


def test_off_is_the_plain_set_itself() -> None:
    bench, ops = Bench(), operators()
    checker = StepChecker(ops, {}, CheckLevel.OFF, num_layers=3)
    for _ in range(3):
        assert checker.begin_step(bench.step.geometry, bench.step.plan) is ops
    sampled = StepChecker(ops, {}, CheckLevel.SAMPLED, num_layers=2)
    sets = [sampled.begin_step(bench.step.geometry, bench.step.plan) for _ in range(257)]
    assert [step for step, one in enumerate(sets) if one is not ops] == [0, 128, 256]
    assert isinstance(sets[0], CheckedOperators)


@given(num_layers=st.integers(1, 700), first=st.integers(0, 5000))
def test_every_layer_has_its_turn_in_any_256_steps(num_layers: int, first: int) -> None:
    seen = {layer for s in range(first, first + 256) for layer in layers_to_check(s, num_layers)}
    assert seen == set(range(num_layers))
    most = max(len(layers_to_check(step, num_layers)) for step in range(first, first + 256))
    assert most == math.ceil(num_layers / 256)


@pytest.mark.parametrize("num_layers", [1, 2, 4, 6, 61])
def test_every_operator_of_every_layer_is_recomputed_in_four_rounds(num_layers: int) -> None:
    bench, seen = Bench(), set()
    checker = StepChecker(operators(), {}, CheckLevel.SAMPLED, num_layers)
    inspector = checker._inspector
    for step in range(256 * TURNS):
        checker.begin_step(bench.step.geometry, bench.step.plan)
        for layer in layers_to_check(step, num_layers):
            seen |= {(layer, turn) for turn in range(TURNS) if inspector.recomputes(turn)}
    assert len(seen) == num_layers * TURNS


def test_only_the_chosen_layer_is_checked() -> None:
    bench = Bench({"rms_norm": lambda x, weight, eps: x * math.nan}, CheckLevel.SAMPLED)
    checker = bench.checker
    bench.ops.begin_layer(1)
    bench.run("rms_norm")
    assert checker.num_checks == 0
    bench.ops.begin_layer(0)
    with pytest.raises(NumericsError, match=Rule.FINITE):
        bench.run("rms_norm")


@given(length=st.integers(0, 60), limit=st.integers(1, 9), tick=st.integers(0, 10**6))
def test_rows_are_picked_within_bounds(length: int, limit: int, tick: int) -> None:
    rows = pick_rows(length, limit, tick)
    assert rows == sorted(set(rows))
    assert set(rows) <= set(range(length))
    assert len(rows) == min(length, limit)
    if limit > 1:
        columns = spread(length, limit)
        assert len(columns) == min(length, limit)
        assert columns == sorted(set(columns))


def test_successive_calls_pick_different_rows() -> None:
    seen = {row for tick in range(64) for row in pick_rows(32, 1, tick)}
    assert seen == set(range(32))


def test_callers_are_checked_too() -> None:
    """A key set with a repeated id, a NaN query, a slot of the null page: before any kernel."""
    bench = Bench()
    step = bench.step
    keys = (
        operators()
        .index_select(
            step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan
        )
        .keys
    )
    (segment,) = keys.segments
    assert isinstance(segment, ListSegment)
    ids = segment.ids.clone()
    ids[6, 1] = ids[6, 0]
    bad = KeySet(keys.axis, (ListSegment("tokens", Space.POSITION, ids, segment.count),))
    with pytest.raises(NumericsError, match=r"sparse_mla of provider 'caller'.*row 6 .*'c'"):
        bench.ops.sparse_mla(step.q_latent, step.q_rope, step.latents, bad, bench.table, 0.2)
    step.q_latent.data[2, 1, 3] = math.nan
    with pytest.raises(NumericsError, match=r"row 2 \(request 'a'.*'q_latent' holds NaN"):
        bench.run("sparse_mla")
    bench = Bench()
    bench.step.geometry.writes["tokens"].slots[4] = 1
    with pytest.raises(NumericsError, match=f"row 4 .*{Rule.SLOT_RANGE}"):
        bench.run("latent_write")
    bench = Bench()
    slots = bench.step.geometry.writes["tokens"].slots
    slots[5] = slots[4]
    with pytest.raises(NumericsError, match=f"row 5 .*{Rule.SLOT_ONCE}"):
        bench.run("latent_write")
    with pytest.raises(GeometryError, match="writes slot"):
        bench.checker.begin_step(bench.step.geometry, bench.step.plan)


def test_a_request_is_reported_once_a_step_and_each_request_for_itself() -> None:
    def all_wrong(*arguments: Any) -> Any:
        return TORCH["rms_norm"](*arguments) * math.nan

    bench = Bench({"rms_norm": all_wrong}, isolates=True)
    for _ in range(3):
        bench.run("rms_norm")
    found = bench.checker.violations()
    assert sorted(str(violation.request) for violation in found) == ["a", "b", "c"]
    assert {v.request: v.row for v in found} == {"a": 0, "b": 3, "c": 4}
    assert bench.checker.num_violations == 3
    bench.checker.begin_step(bench.step.geometry, bench.step.plan, ("x", "y", "z"))
    assert bench.checker.violations() == ()
