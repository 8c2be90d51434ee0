"""The first motivating fault: 19 query rows under 20 lengths and 21 cumulative entries.

A synchronising stage pads the lengths to the bucket, another narrows the query to its live rows,
and the attention kernel gets companions of two geometries. First a naive pipeline of loose tensors
shows the fault, loud and silent; then gnomon refuses the mixture by the names of both axes, and
gives equal rows for every bucket, eagerly and in captured-style replay (the same buffers,
refreshed), with rope and without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry, RowTensor, WriteSlots
from gnomon.attention.indices import KeySet, causal_list
from gnomon.attention.plan import plan_step, sync_needs
from gnomon.attention.transforms import pad_rows, select
from gnomon.errors import GeometryError
from tests.laws.bugs.captured import CapturedStep, upper_bounds
from tests.laws.bugs.op_cases import OpCase, op_case, operators, plain_attention, watched
from tests.laws.bugs.tiny import Bench, assert_same_rows, padded_to, rows_by_token, token_list

LIVE, BUCKET, SCALE = 19, 20, 0.3
KV = [3 + 2 * i for i in range(LIVE)]

# ------------------------------------------------------------------ the naive pipeline


def naive_varlen_kernel(q: Tensor, lengths: list[int], cu_q: list[int], keys: list[Tensor]) -> Any:
    """One query row a sequence, as fused varlen kernels want it."""
    if q.shape[0] != len(lengths):
        raise RuntimeError("batch_size must be equal to batch_size_k")
    if len(cu_q) != len(lengths) + 1:
        raise RuntimeError("cu_seqlens_q must have batch_size + 1 entries")
    rows = [
        plain_attention(q[i], keys[i][: lengths[i]], 32, SCALE)[0]
        if lengths[i]
        else q[i, :, :32] * 0
        for i in range(len(lengths))
    ]
    return torch.stack(rows)


def naive_metadata(lengths: list[int], bucket: int) -> dict[str, Any]:
    """What the synchronising stage leaves behind: lengths and cumulative sums of the bucket."""
    padded = lengths + [0] * (bucket - len(lengths))
    return {"lengths": padded, "cu_q": list(range(bucket + 1))}


def queries(case: OpCase) -> Tensor:
    return torch.cat((case.q_latent.data, case.q_rope.data), -1)


def test_naive_pipeline_dies_on_19_rows_20_lengths_21_cumulative_entries() -> None:
    case = op_case([1] * LIVE, KV)
    bag = naive_metadata(KV, BUCKET)
    narrowed = queries(case)[:LIVE]
    assert (len(narrowed), len(bag["lengths"]), len(bag["cu_q"])) == (19, 20, 21)
    with pytest.raises(RuntimeError, match="batch_size must be equal to batch_size_k"):
        naive_varlen_kernel(narrowed, bag["lengths"], bag["cu_q"], case.stored)


def test_naive_pipeline_is_silently_wrong_where_the_padding_is_not_last() -> None:
    """Rejected drafts leave holes: the query drops row 7, its lengths drop the last entry."""
    case = op_case([1] * LIVE, KV)
    live = [r for r in range(LIVE) if r != 7]
    wrong = naive_varlen_kernel(
        queries(case)[live], KV[: LIVE - 1], list(range(LIVE)), case.stored[: LIVE - 1]
    )
    right, _ = case.expected(case.causal(), SCALE)
    assert torch.allclose(wrong[:7], right[:7])
    assert not torch.allclose(wrong[7:], right[live][7:], atol=1e-2)


# ------------------------------------------------------------------ gnomon


def attend(case: OpCase, geometry: Geometry, **named: Any) -> Any:
    """Attention of the geometry's own rows over all that they see."""
    ops = named.get("ops") or operators()
    width = max(geometry.requests.host.kv_len)
    keys = named.get("keys") or KeySet(
        geometry.rows, (causal_list(geometry.rows, "tokens", width),)
    )
    latent, rope = named.get("q") or (case.q_latent, case.q_rope)
    return ops.sparse_mla(latent, rope, case.pool, keys, geometry.tables["tokens"], SCALE)


def test_a1_companions_of_two_geometries_are_refused_by_name() -> None:
    case = op_case([1] * LIVE, KV)
    live = case.geometry
    padded = pad_rows(live, BUCKET)
    keys = KeySet(padded.rows, (causal_list(padded.rows, "tokens", max(KV)),))
    with pytest.raises(GeometryError, match=r"keys is on row axis 'step > pad 20' \(20 rows\)"):
        attend(case, live, keys=keys)
    with pytest.raises(GeometryError, match=r"19, 4, 32\) was put on row axis 'step > pad 20'"):
        RowTensor(padded.rows, case.q_latent.data)
    with pytest.raises(GeometryError, match=r"one slot for each of the 20 rows"):
        WriteSlots(padded.rows, torch.zeros(BUCKET + 1, dtype=torch.int64))
    dims, agreed = Bench().config.attention_dims(), replace(sync_needs(live), bucket=BUCKET)
    with pytest.raises(GeometryError, match="agreed on 20 rows"):
        plan_step(live, dims, sync=agreed)


def test_a1_equal_content_does_not_make_two_axes_one() -> None:
    """Narrowing a padded step gives back the same numbers, on an axis of its own."""
    case = op_case([1] * LIVE, KV)
    narrowed = select(pad_rows(case.geometry, BUCKET), range(LIVE))
    keys = KeySet(narrowed.rows, (causal_list(narrowed.rows, "tokens", max(KV)),))
    with pytest.raises(GeometryError, match="select 19 of 20"):
        attend(case, case.geometry, keys=keys)


@pytest.mark.parametrize("rope", [8, 0], ids=["rope", "nope"])
@pytest.mark.parametrize("provider", ["reference", "torch"])
@pytest.mark.parametrize("live", [19, 20, 1])
def test_a1_padded_equals_unpadded(live: int, provider: str, rope: int) -> None:
    lengths = [*KV, 50][:live]
    seen: list[tuple[int, ...]] = []

    def watch(name: str, args: tuple[Any, ...]) -> None:
        if name == "sparse_mla":
            q_latent, q_rope, _, slots, count, _ = args
            seen.append((len(q_latent), len(q_rope), len(slots), len(count)))

    results = []
    for num_rows in (live, BUCKET, 3 * BUCKET):
        case = op_case([1] * live, lengths, rope=rope)
        geometry = pad_rows(case.geometry, num_rows)
        fill = torch.nan  # what stands in padding rows must not matter
        q = [torch.full((num_rows, 4, d), fill, dtype=torch.float64) for d in (32, rope)]
        q[0][:live], q[1][:live] = case.q_latent.data, case.q_rope.data
        pair = tuple(RowTensor(geometry.rows, part) for part in q)
        got = attend(case, geometry, q=pair, ops=watched(operators(provider), watch))
        expected = case.expected(case.causal(), SCALE)
        assert torch.allclose(got.out.data[:live], expected[0], atol=1e-12)
        assert torch.allclose(got.lse.data[:live], expected[1], atol=1e-12)
        assert bool((got.out.data[live:] == 0).all())
        assert bool((got.lse.data[live:] == -torch.inf).all())
        results.append(got.out.data[:live])
    assert all(torch.equal(results[0], one) for one in results[1:])
    assert all(len(set(rows)) == 1 for rows in seen), "a kernel got companions of two geometries"


@pytest.mark.parametrize("rope", [8, 0], ids=["rope", "nope"])
def test_a1_captured_style_replay_of_the_operator(rope: int) -> None:
    """Live rows 19, 20, 1, 19 through one set of buffers; stale rows of longer steps do nothing."""
    case = op_case([1] * BUCKET, [*KV, 50], rope=rope)
    whole, whole_lse = case.expected(case.causal(), SCALE)
    captured = upper_bounds(case.geometry)
    live_rows = [t.clone() for t in (captured.rows.request, captured.rows.kv_len)]
    q = [part.data.clone() for part in (case.q_latent, case.q_rope)]
    buffers = [torch.full_like(part, torch.nan) for part in q]
    pair = tuple(RowTensor(captured.rows, part) for part in buffers)
    for live in (19, 20, 1, 19):
        captured.rows.request.copy_(live_rows[0])[live:] = -1
        captured.rows.kv_len.copy_(live_rows[1])[live:] = 0
        for buffer, new in zip(buffers, q, strict=True):
            buffer[:live] = new[:live]  # rows behind keep what an earlier step left there
        got = attend(case, captured, q=pair)
        assert torch.allclose(got.out.data[:live], whole[:live], atol=1e-12)
        assert torch.allclose(got.lse.data[:live], whole_lse[:live], atol=1e-12)
        assert bool((got.out.data[live:] == 0).all())
        assert bool((got.lse.data[live:] == -torch.inf).all())


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_a1_captured_style_replay_of_the_model(kind: str) -> None:
    """Decodes of 19, 20, 1 and 19 requests replay one captured step of 20; addresses stay."""
    lengths = [*KV, 50]
    eager, replayed = Bench(kind, num_pages=400), Bench(kind, num_pages=400)
    requests = [eager.request(f"r{i}", token_list(n + 4, i)) for i, n in enumerate(lengths)]
    twins = [replayed.request(f"r{i}", one.tokens) for i, one in enumerate(requests)]
    for bench, mine in ((eager, requests), (replayed, twins)):
        bench.step([(one, n) for one, n in zip(mine, lengths, strict=True)])
    largest = replayed.geometry([(replace(one, done=len(one.tokens) - 1), 1) for one in twins])
    captured = CapturedStep(replayed, largest)
    addresses = captured.addresses()
    for live in (19, 20, 1, 19):
        expected = eager.step([(one, 1) for one in requests[:live]])
        work = [(one, 1) for one in twins[:live]]
        step = pad_rows(replayed.geometry(work), BUCKET)
        captured.refresh(step, replayed.token_ids(step, twins))
        hidden = RowTensor(step.rows, captured.replay())
        assert_same_rows(expected, rows_by_token(hidden, twins), 1e-12)
        for one, _ in work:
            one.done += 1
    assert captured.addresses() == addresses


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_a1_real_model_padded_to_the_bucket(kind: str) -> None:
    """19 decode rows through the whole model: as they are, and padded to 20 and to 64 rows."""

    def watch(name: str, args: tuple[Any, ...]) -> None:
        if name == "sparse_mla":
            q_latent, q_rope, _, slots, count, _ = args
            assert len({len(q_latent), len(q_rope), len(slots), len(count)}) == 1

    found = []
    for bucket in (LIVE, BUCKET, 64):
        bench = Bench(kind, num_pages=400)
        bench.ops = watched(bench.ops, watch)
        requests = [bench.request(f"r{i}", token_list(n, i)) for i, n in enumerate(KV)]
        bench.step([(one, len(one.tokens) - 1) for one in requests])
        found.append(bench.step([(one, 1) for one in requests], change=padded_to(bucket)))
    assert_same_rows(found[0], found[1], 1e-12)
    assert_same_rows(found[0], found[2], 1e-12)
