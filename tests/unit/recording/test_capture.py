"""Capture: what is kept of a call, under limits, and that the step does not notice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import RowTensor
from gnomon.attention.ops.operators import Operators
from gnomon.attention.plan import Budget
from gnomon.attention.providers.torch import PROVIDER as TORCH
from gnomon.attention.recording import POISON, Recording, value_bytes
from gnomon.attention.recording_calls import NOT_KEPT, SHAPES, WRITTEN
from gnomon.attention.recording_capture import Capture, Limits
from gnomon.attention.recording_replay import replay
from gnomon.attention.spec import SPECS, Scale
from tests.unit.ops.build_step import DIMS, small_step
from tests.unit.recording.recorded import calls_of


def captured(step, limits, kernels=TORCH.kernels):
    """Index selection and attention of a small step: (capture, selection, attention)."""
    parts = {id(step.latents): "layers.4.latent", id(step.index_keys): "layers.4.index_key"}
    capture = Capture(step.geometry, step.plan, parts, limits)
    ops = capture.wrapped(Operators(kernels))
    ops.begin_layer(4)
    found = ops.index_select(
        step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan
    )
    table = step.geometry.tables["tokens"]
    attended = ops.sparse_mla(step.q_latent, step.q_rope, step.latents, found.keys, table, 0.2)
    return capture, found, attended


@pytest.fixture(scope="module")
def step():
    """Two decodes, a chunk behind a context, a prefill; padded rows; keys in several chunks."""
    return small_step(
        [1, 1, 7, 30], [40, 12, 60, 30], budget=Budget(score_bytes=20_000), num_rows=45
    )


def as_recording(capture):
    return Recording({}, DIMS, 1, {}, tuple(capture.calls))


def test_the_step_gets_what_it_would_have_got(step):
    table = step.geometry.tables["tokens"]
    ops = Operators(TORCH.kernels)
    plain = ops.index_select(
        step.index_query, step.head_weights, step.index_keys, step.geometry, step.plan
    )
    out = ops.sparse_mla(step.q_latent, step.q_rope, step.latents, plain.keys, table, 0.2)
    for limits in (Limits(), Limits(num_rows=3), Limits(call_bytes=1), Limits(total_bytes=0)):
        _, found, attended = captured(step, limits)
        assert torch.equal(found.keys.segments[0].ids, plain.keys.segments[0].ids)
        assert torch.equal(attended.out.data, out.out.data)


def test_calls_know_layer_part_and_rows(step):
    """A row's count follows from its kv_len: that is how one sees which row it is."""
    capture, _, _ = captured(step, Limits())
    kv_len = step.plan.sparse.axis.kv_len
    assert {call.layer for call in capture.calls} == {4}
    for call in capture.calls:
        if call.op == "sparse_mla":
            assert call.part == "layers.4.latent"
            assert torch.equal(call.arguments[4], kv_len.clamp_max(DIMS.index_topk))
            assert torch.equal(call.rows["R"], torch.arange(len(kv_len)))
        if call.op in ("index_scores", "index_scores_paged"):
            count, rows = call.arguments[-2], call.rows["R"]
            assert torch.all(count <= kv_len[rows])
            assert torch.all((count == kv_len[rows]) | (kv_len[rows] > count.max()) | (count == 0))


def test_every_scored_row_is_met_with_all_its_keys(step):
    """Over the chunks, the rows that are named see each of their keys exactly once."""
    capture, _, _ = captured(step, Limits())
    kv_len = step.plan.sparse.axis.kv_len
    seen = torch.zeros_like(kv_len)
    calls = [call for call in capture.calls if call.op.startswith("index_scores")]
    assert len(calls) > 3
    for call in calls:
        if call.op == "index_scores":
            seen[call.rows["R"]] += call.arguments[3]
        else:
            hidden = call.results["scores"] == -torch.inf
            seen[call.rows["R"]] += (~hidden).sum(1, dtype=torch.int32)
    scored = kv_len > DIMS.index_topk
    assert torch.equal(seen[scored], kv_len[scored])


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_few_rows_of_a_call_replay_to_the_same_bits(step, num_rows):
    capture, _, _ = captured(step, Limits(num_rows=num_rows))
    whole, _, _ = captured(step, Limits())
    for call, full in zip(capture.calls, whole.calls, strict=True):
        if call.op == "context_gather":
            assert call.results["out"].shape[0] == min(num_rows, full.results["out"].shape[0])
            continue
        kept = min(num_rows, full.rows["R"].shape[0])
        assert call.rows["R"].shape == (kept,)
        # Where a row of the call stood in the whole call: rows of a step are named once a call.
        places = [full.rows["R"].tolist().index(row) for row in call.rows["R"].tolist()]
        assert places == sorted(places)
        for name, tensor in call.results.items():
            assert torch.equal(tensor, full.results[name][places])
    assert replay(as_recording(capture), TORCH).first is None


def test_a_large_call_keeps_fewer_rows_and_a_huge_one_none(step):
    sizes = []
    for limit in (1 << 20, 30_000, 6_000, 100):
        capture, _, _ = captured(step, Limits(call_bytes=limit))
        kept = [call for call in capture.calls if not call.withheld]
        for call in kept:
            assert sum(value_bytes(value) for value in call.arguments) <= limit
        sizes.append(sum(call.rows["R"].shape[0] for call in kept if call.op == "sparse_mla"))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == 0
    (attention,) = (call for call in capture.calls if call.op == "sparse_mla")
    assert attention.withheld == "one row is larger than the limit of a call"


def test_a_full_recording_keeps_only_the_fact_of_a_call(step):
    capture, _, _ = captured(step, Limits(total_bytes=20_000))
    withheld = [bool(call.withheld) for call in capture.calls]
    assert withheld == sorted(withheld)
    assert not withheld[0]
    assert withheld[-1]
    assert capture.calls[-1].withheld == "the recording is full"
    report = replay(as_recording(capture), TORCH)
    assert report.skipped == {"the recording is full": sum(withheld)}


def test_a_pool_keeps_only_the_entries_that_are_read(step):
    capture, found, _ = captured(step, Limits())
    _, call = calls_of(as_recording(capture), "sparse_mla")[0]
    part = call.arguments[2]
    table, axis = step.geometry.tables["tokens"], step.plan.sparse.axis
    named = table.entry_slots(axis.request[:, None], found.keys.segments[0].ids)
    original = part.page_ids[part.slots // part.page_size] * part.page_size
    original += part.slots % part.page_size
    assert original.tolist() == sorted({int(slot) for slot in named.flatten() if slot >= 0})
    assert torch.equal(part.entries, step.latents.layout.gather_bytes(step.latents, original))
    pool = part.build()
    every = torch.ones(pool.num_slots, dtype=torch.bool)
    every[part.slots] = False
    beside = pool.layout.gather_bytes(pool, every.nonzero()[:, 0])
    assert beside.numel()
    assert torch.all(beside == POISON)
    assert part.stray_slots(pool).numel() == 0


def test_later_writes_do_not_reach_what_was_kept(step):
    query = step.q_latent.data.clone()
    own = replace(step, q_latent=RowTensor(step.q_latent.axis, query))
    capture, _, attended = captured(own, Limits())
    _, call = calls_of(as_recording(capture), "sparse_mla")[0]
    before = call.arguments[0].clone()
    query.zero_()
    attended.out.data.zero_()
    assert torch.equal(call.arguments[0], before)
    assert call.results["out"].abs().sum() > 0


def test_gaps_between_rows_are_kept():
    """A kernel that reads strided rows as if they were packed must do so in the replay too."""
    wide = torch.randn(6, 4, 40)
    part = wide[:, :, 8:24]
    capture, _, _ = captured(small_step([2], [9]), Limits())
    kept = capture._copied(part)
    assert kept.stride() == part.stride()
    assert torch.equal(kept, part)
    assert capture._copied(part.contiguous()).is_contiguous()
    spread = torch.randn(6, 1).expand(6, 9)
    assert torch.equal(capture._copied(spread), spread)


def test_a_failing_call_is_kept_with_its_inputs(step):
    def breaks(*_):
        raise RuntimeError("no luck")

    capture = Capture(step.geometry, step.plan, {}, Limits())
    ops = capture.wrapped(Operators({**TORCH.kernels, "rms_norm": breaks}))
    with pytest.raises(RuntimeError, match="no luck"):
        ops.rms_norm(torch.ones(2, 3), torch.ones(3), 1e-6)
    (call,) = capture.calls
    assert call.error == "RuntimeError: no luck"
    assert call.results is None
    assert torch.equal(call.arguments[0], torch.ones(2, 3))


def test_a_fault_of_the_capture_is_not_the_steps_fault(step, caplog):
    """A slot past the pool: the kernel has its own opinion of it, the capture has none."""
    capture = Capture(step.geometry, step.plan, {}, Limits())
    kernels = {**TORCH.kernels, "sparse_mla": lambda *_: (torch.ones(1), torch.ones(1))}
    ops = capture.wrapped(Operators(kernels))
    slots = torch.full((1, 1), 10**6)
    count = torch.ones(1, dtype=torch.int32)
    q = torch.ones(1, 4, 32)
    out, _ = ops.kernels["sparse_mla"](q, q[..., :8], step.latents, slots, count, 1.0)
    assert torch.equal(out, torch.ones(1))
    assert "not recorded: slot 1000000 is past the pool" in capture.calls[0].withheld
    assert "could not be recorded" in caplog.text


def test_every_operator_has_a_shape_that_fits_its_arguments():
    assert SHAPES.keys() | NOT_KEPT == SPECS.keys()
    assert not SHAPES.keys() & NOT_KEPT
    for op, shape in SHAPES.items():
        names = [argument.name for argument in SPECS[op].arguments]
        assert all(place < len(names) for place in shape.rows)
        for kind in ("pool", "slots", "pages"):
            place = getattr(shape, kind)
            assert place is None or names[place] == kind


@pytest.mark.parametrize("op", sorted(SHAPES))
@pytest.mark.parametrize("num_rows", [None, 4])
def test_every_case_of_every_spec_comes_back(step, op, num_rows):
    """Whatever a kernel may be called with, kept and replayed it gives the same bits."""
    capture = Capture(step.geometry, step.plan, {}, Limits(num_rows=num_rows))
    ops = capture.wrapped(Operators(TORCH.kernels))
    generator = torch.Generator().manual_seed(3)
    cases = list(SPECS[op].cases(generator, torch.float32, Scale()))
    for case in cases:
        ops.kernels[op](*case.arguments)
    assert [call.withheld for call in capture.calls] == [""] * len(cases)
    report = replay(as_recording(capture), TORCH)
    assert report.first is None
    if num_rows is None:  # fewer rows may take another path of a kernel's
        assert all(call.comparison.is_equal for call in report.calls)


def test_written_entries_are_in_the_rows_own_order(step):
    capture = Capture(step.geometry, step.plan, {}, Limits())
    ops = capture.wrapped(Operators(TORCH.kernels))
    case = next(SPECS["latent_write"].cases(torch.Generator(), torch.float32, Scale()))
    ops.kernels["latent_write"](*case.arguments)
    written: Tensor = capture.calls[0].results[WRITTEN]
    pool, slots = case.arguments[4], case.arguments[5]
    assert torch.equal(written, pool.layout.gather_bytes(pool, slots))
