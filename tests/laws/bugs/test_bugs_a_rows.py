"""Cases A of reference/bugs.md: padding breaks the contract of row counts.

A1, the first motivating fault, is in tests/laws/test_motivating_faults_padding.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry, PageTable, WriteSlots, build_geometry
from gnomon.attention.plan import agree, plan_step, sync_needs
from gnomon.attention.taps import RecordingTap
from gnomon.attention.transforms import expand_drafts, pad_rows
from gnomon.errors import GeometryError
from gnomon.models.registry import build_model
from tests.laws.bugs.op_cases import PROVIDERS, operators, watched
from tests.laws.bugs.tiny import NEVER, Bench, assert_same_rows, padded_to, token_list


class ListTap(RecordingTap):
    """Keeps every key set as the layers got it, padding rows too."""

    def __init__(self) -> None:
        super().__init__(wants_margin=False)
        self.lists: list[Any] = []

    def index(self, layer: int, selection: Any) -> Any:
        self.lists.append(selection.keys)
        return super().index(layer, selection)


def row_counts(name: str, args: tuple[Any, ...]) -> set[int]:
    """Rows of every per-row argument of a kernel."""
    of: dict[str, tuple[int, ...]] = {
        "index_scores": (0, 1, 3),
        "index_scores_paged": (0, 1, 3, 4),
        "topk": (0, 1),
        "sparse_mla": (0, 1, 3, 4),
    }
    return {len(args[i]) for i in of.get(name, ())}


def test_a2_short_rank_is_padded_to_the_longest() -> None:
    """Two data-parallel ranks, prompts 5 and 11: rows 5..10 of rank 0 select nothing."""
    benches = [Bench(), Bench()]
    requests = [b.request("r", token_list(n, n)) for b, n in zip(benches, (5, 11), strict=True)]
    steps = [b.geometry([(one, len(one.tokens))]) for b, one in zip(benches, requests, strict=True)]
    agreed = agree([sync_needs(step) for step in steps])
    assert agreed.bucket == 11
    tap = ListTap()
    got = benches[0].step([(requests[0], 5)], change=padded_to(agreed.bucket), tap=tap)
    for keys in tap.lists:
        keys.check()
        assert keys.axis.num_rows == 11
        assert bool((keys.segments[0].ids[5:] == -1).all())
        assert keys.segments[0].count.tolist() == [1, 2, 3, 4, 5, *[0] * 6]
    alone = Bench()
    assert_same_rows(alone.prefill([alone.request("r", token_list(5, 5))]), got, 1e-12)


def test_a3_drafts_beside_a_last_chunk_of_one_token() -> None:
    """3 decodes with 2 drafts each, and a prompt whose last chunk is 1 token."""

    def watch(name: str, args: tuple[Any, ...]) -> None:
        assert len(row_counts(name, args)) <= 1, name

    bench, lengths = Bench(num_pages=400), (20, 33, 12, 17)
    requests = [bench.request(f"r{i}", token_list(n, i)) for i, n in enumerate(lengths)]
    expected = bench.prefill(requests)
    bench.ops = watched(bench.ops, watch)
    again = [bench.request(f"r{i}", token_list(n, i)) for i, n in enumerate(lengths)]
    bench.step([(one, n - k) for one, n, k in zip(again, lengths, (3, 3, 3, 1), strict=True)])
    got = bench.step([(one, 1) for one in again], change=lambda g: expand_drafts(g, [2, 2, 2, 0]))
    assert len(got) == 10
    assert_same_rows({token: expected[token] for token in got}, got)


def compressed_step(kv_lens: list[int], num_drafts: int) -> Geometry:
    """Decodes over a token group and a group of one entry for four tokens."""
    width = max(kv_lens) + num_drafts
    pages = [[1 + b * width + i for i in range(width)] for b in range(len(kv_lens))]
    packed = torch.tensor(pages, dtype=torch.int32)
    tables = {"tokens": pages, "compressed": PageTable("compressed", packed, 2, 4)}
    return build_geometry([1] * len(kv_lens), kv_lens, tables, page_size=1)


def test_a4_fewer_live_requests_than_captured() -> None:
    """Captured for 8 requests of 1 + 3 rows, 5 live; lengths of padding rows are 0."""
    geometry = pad_rows(expand_drafts(compressed_step([9, 4, 1, 14, 7], 3), 3), 8 * 4)
    geometry.check()
    assert geometry.rows.num_live == 20
    assert geometry.rows.kv_len[20:].tolist() == [0] * 12
    packed = geometry.tables["compressed"]
    assert packed.num_entries(geometry.rows.kv_len)[20:].tolist() == [0] * 12
    for group in ("tokens", "compressed"):
        assert geometry.writes[group].slots[20:].tolist() == [-1] * 12
    plan = plan_step(geometry, Bench().config.attention_dims(), policy=NEVER)
    assert plan.axis is geometry.rows


def test_a5_a_plan_from_before_the_padding_is_refused() -> None:
    """Verify rows of 2 and 5 requests; metadata of the unpadded step meets padded inputs."""
    bench = Bench(num_pages=400)
    requests = [bench.request(f"r{i}", token_list(20, i)) for i in range(5)]
    bench.step([(one, 16) for one in requests])
    few = expand_drafts(bench.geometry([(one, 1) for one in requests[:2]]), 3)
    many = expand_drafts(bench.geometry([(one, 1) for one in requests]), 3)
    agreed = agree([sync_needs(few), sync_needs(many)])
    dims = bench.config.attention_dims()
    with pytest.raises(GeometryError, match="agreed on 20 rows"):
        plan_step(few, dims, sync=agreed)
    early = plan_step(few, dims, policy=NEVER)
    padded = pad_rows(few, agreed.bucket)
    with pytest.raises(GeometryError, match="pad 20"):
        bench.forward(padded, requests[:2], plan=early)
    bench.forward(padded, requests[:2])


def test_a7_padding_rows_write_nothing() -> None:
    """13 live rows in a bucket of 16: 13 entries of each part change, all others keep poison."""
    bench = Bench()
    one = bench.request("r", token_list(13), room=7)
    for pool in bench.pools.values():
        pool.storage.fill_(0x7F)
    before = {part: pool.storage.clone() for part, pool in bench.pools.items()}
    bench.step([(one, 13)], change=padded_to(16))
    for part, pool in bench.pools.items():
        width = pool.layout.bytes_per_token
        changed = (pool.storage != before[part]).view(-1, width).any(1)
        slots = {one.pages[p // 4] * 4 + p % 4 for p in range(13)}
        assert set(changed.nonzero()[:, 0].tolist()) == slots


def test_a7_positions_and_slots_of_padding_rows_are_checked() -> None:
    geometry = pad_rows(build_geometry([13], [13], {"tokens": [[3, 4, 5, 6]]}, 4), 16)
    with pytest.raises(GeometryError, match="one slot for each of the 16 rows"):
        WriteSlots(geometry.rows, geometry.writes["tokens"].slots[:13])
    geometry.rows.position[14] = 2**30
    with pytest.raises(GeometryError, match="I3: a padding row"):
        geometry.check()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_a8_poisoned_padding_rows_stay_where_they_are(kind: str, provider: str) -> None:
    """Bucket 8 with one token: rows 1..7 are NaN in every layer, and no live row sees it."""
    bench = Bench(kind, provider=provider)
    params = dict(bench.params)
    params["embed.weight"] = params["embed.weight"].clone()
    params["embed.weight"][0] = torch.nan  # the token id of padding rows
    poisoned = build_model(bench.config, params, 512)
    tokens = [token or 1 for token in token_list(11)]
    rows: list[Any] = []
    padding: list[Tensor] = []
    bench.ops = watched(
        bench.ops,
        lambda name, args: padding.append(args[1][1:]) if name == "moe" and rows else None,
    )
    for model, bucket in ((bench.model, 1), (poisoned, 8)):
        bench.model = model
        one = bench.request("r", tokens)
        bench.step([(one, 10)])
        padding.clear()
        rows.append(bench.step([(one, 1)], change=padded_to(bucket)))
    assert_same_rows(rows[0], rows[1], 1e-12)
    assert padding
    assert all(len(ids) == 7 and bool((ids == -1).all()) for ids in padding)  # no expert for them


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a11_replayed_topk_follows_the_lengths_of_now(provider: str) -> None:
    """One set of buffers: lengths k + 9, then 3, then k + 9 again."""
    k, topk = 8, operators(provider).kernels["topk"]
    scores = torch.randn(2, k + 9, generator=torch.Generator().manual_seed(1))
    count = torch.zeros(2, dtype=torch.int32)
    for lengths in ([k + 9, 3], [3, k + 9], [k + 9, 0], [k, k + 1]):
        live = torch.randn(scores.shape, generator=torch.Generator().manual_seed(sum(lengths)))
        for row, length in enumerate(lengths):
            live[row, length:] = -torch.inf
        scores.copy_(live)
        count.copy_(torch.tensor(lengths))
        got = topk(scores, count, k)
        for row, length in enumerate(lengths):
            best = sorted(sorted(range(length), key=lambda s: -float(live[row, s]))[:k])
            assert got.ids[row].tolist() == best + [-1] * (k - len(best))
            assert int(got.count[row]) == len(best)


@pytest.mark.parametrize(("live", "bucket"), [(3, 4), (5, 8), (7, 8)])
def test_a13_verify_step_padded_to_a_bucket_of_requests(live: int, bucket: int) -> None:
    bench = Bench(num_pages=600)
    requests = [bench.request(f"r{i}", token_list(14 + i, i)) for i in range(live)]
    expected = bench.prefill(requests)
    again = [bench.request(f"r{i}", token_list(14 + i, i)) for i in range(live)]
    bench.step([(one, len(one.tokens) - 4) for one in again])
    slots: list[Tensor] = []

    def change(geometry: Geometry) -> Geometry:
        padded = pad_rows(expand_drafts(geometry, 3), 4 * bucket)
        padded.check()
        slots.append(padded.writes["tokens"].slots)
        return padded

    got = bench.step([(one, 1) for one in again], change=change)
    assert slots[0][4 * live :].tolist() == [-1] * (4 * (bucket - live))
    assert_same_rows({token: expected[token] for token in got}, got)


def test_a14_an_idle_rank_runs_a_whole_step_of_padding() -> None:
    """Ten requests on rank 0, none on rank 1: no invented request, no row -1, finite rows."""
    busy, idle = Bench(num_pages=400), Bench()
    requests = [busy.request(f"r{i}", token_list(6, i)) for i in range(10)]
    work = [(one, 6) for one in requests]
    steps = [busy.geometry(work), idle.geometry([])]
    agreed = agree([sync_needs(step) for step in steps])
    padded = pad_rows(steps[1], agreed.bucket)
    padded.check()
    assert (padded.rows.num_rows, padded.rows.num_live) == (60, 0)
    before = {part: pool.storage.clone() for part, pool in idle.pools.items()}
    output = idle.forward(padded, [])
    assert bool(output.hidden.data.isfinite().all())
    assert not bool(output.nan_rows.data.any())
    assert all(torch.equal(before[part], pool.storage) for part, pool in idle.pools.items())
    dims = idle.config.attention_dims()
    plan = plan_step(padded, dims, sync=replace(agreed, all_decode=True))
    assert plan.score_chunks == ()
    busy.step(work, change=padded_to(agreed.bucket))
