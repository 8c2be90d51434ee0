"""The second motivating fault: context parallelism with rows dealt round-robin over ranks.

A rank's rows are strided, its last chunk is ragged, padding rows have position 0 and lists of -1.
A naive sparse path that goes on with the global, contiguous geometry computes plausible text from
wrong positions. First that pipeline shows its faults; then n ranks of gnomon, simulated in one
process with a real all-gather, equal one rank: hidden rows, selections, caches and tokens.
Sparse everywhere: no chunk, padded or of several requests, falls back to dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.geometry import Geometry, RowTensor
from gnomon.attention.plan import plan_step
from gnomon.attention.routes import Route
from gnomon.attention.taps import RecordingTap
from gnomon.attention.transforms import ShardStrategy, shard_rows
from gnomon.errors import GeometryError
from gnomon.parallel.simulated import SimulatedRank, run_ranks
from tests.laws.bugs.captured import CapturedStep
from tests.laws.bugs.op_cases import op_case
from tests.laws.bugs.ranks import Ranks, assert_caches_equal
from tests.laws.bugs.tiny import (
    NEVER,
    Bench,
    Request,
    Token,
    assert_same_rows,
    rows_by_token,
    selections,
    token_list,
)

SCALE = 0.3
Chunks = Sequence[tuple[int, ...]]  # tokens of each request, step by step

# Several requests a chunk, ragged ends, continuation chunks with a large prefix, decodes beside
# prefills, and steps of fewer rows than ranks.
PLANS: dict[str, tuple[tuple[int, ...], Chunks]] = {
    "prompt 31": ((31,), [(16,), (15,)]),
    "prompt 32": ((32,), [(16,), (16,)]),
    "prompt 33": ((33,), [(16,), (16,), (1,)]),
    "three ragged": ((13, 29, 7), [(13, 5, 2), (0, 17, 4), (0, 7, 1)]),
    "large prefix": ((70, 41), [(61, 3), (5, 37), (4, 1)]),
    "fewer rows than ranks": ((12, 3), [(10, 0), (1, 0), (1, 1), (0, 2)]),
}


# ------------------------------------------------------------------ the naive pipeline


def dealt(num_tokens: int, start: int, rank: int, size: int) -> list[int | None]:
    """Positions of a rank's rows; None: padding up to the rows of rank 0."""
    mine: list[int | None] = list(range(start + rank, start + num_tokens, size))
    return mine + [None] * (-(-num_tokens // size) - len(mine))


def naive_visible(rows: Sequence[int | None], start: int) -> list[int]:
    """The global, contiguous geometry on local rows: row i stands at start + i."""
    return [start + i + 1 for i in range(len(rows))]


def naive_key_stop(rows: Sequence[int | None]) -> int:
    """How far keys are read: to the last row's position, which is 0 for a padding row."""
    return (rows[-1] or 0) + 1


def naive_workspace_ids(ids: Tensor, first_key: int) -> Tensor:
    """Position -> row of a gathered workspace, without a look at the sentinel."""
    return ids - first_key


def test_naive_ranks_see_wrong_positions() -> None:
    """Every rank's rows but the first are wrong, none fails: plausible text from wrong keys."""
    case = op_case([15], [31])
    right, _ = case.expected(case.causal(), SCALE)
    for rank in range(2):
        rows = dealt(15, 16, rank, 2)
        local = {
            row - 16: range(seen)
            for row, seen in zip(rows, naive_visible(rows, 16), strict=True)
            if row
        }
        wrong, _ = case.expected(local, SCALE)
        for i, row in enumerate(local):
            is_right = torch.allclose(wrong[row], right[row], atol=1e-3)
            assert is_right == (rank == 0 and i == 0)


def test_naive_padding_row_poisons_the_last_row_mask() -> None:
    rows = dealt(15, 16, 1, 2)
    assert rows[-1] is None
    assert naive_key_stop(rows) == 1  # its real rows see up to 30 keys
    assert naive_key_stop(dealt(16, 16, 1, 2)) == 32  # no padding, no fault: easily missed


def test_naive_padding_row_gives_indices_below_the_sentinel() -> None:
    ids = torch.tensor([[16, 18, 20], [-1, -1, -1]])
    assert naive_workspace_ids(ids, 16).tolist() == [[0, 2, 4], [-17, -17, -17]]


# ------------------------------------------------------------------ gnomon


def requests_of(bench: Bench, lengths: Sequence[int]) -> list[Request]:
    return [bench.request(f"r{i}", token_list(n, i)) for i, n in enumerate(lengths)]


def assert_ranks_equal_one(
    bench: Bench, ranks: Ranks, lengths: Sequence[int], chunks: Chunks, pad_to: int = 0
) -> tuple[list[Request], list[Request]]:
    """Run the chunks on one rank and on all; hidden rows, selections and caches are equal."""
    alone = requests_of(bench, lengths)
    shared = [Request(one.name, list(one.tokens), one.pages) for one in alone]
    for sizes in chunks:
        tap = RecordingTap(wants_margin=False)
        work = [(one, n) for one, n in zip(alone, sizes, strict=True) if n]
        expected = bench.step(work, tap=tap)
        work = [(one, n) for one, n in zip(shared, sizes, strict=True) if n]
        got = ranks.step(work, pad_to)
        assert_same_rows(dict(sorted(expected.items())), got)
        found = selections(tap)
        for key, rows in ranks.selected().items():
            _, name = key
            for _, position in (token for token in got if token[0] == name):
                assert rows[position] == found[key][position], (key, position)
        for cache in ranks.caches:
            assert_caches_equal(bench.pools, cache)
    return alone, shared


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_i1_ranks_equal_one_rank(size: int, plan: str) -> None:
    bench = Bench()
    assert_ranks_equal_one(bench, Ranks(bench, size), *PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_i1_zigzag_ranks_equal_one_rank(plan: str) -> None:
    bench = Bench()
    assert_ranks_equal_one(bench, Ranks(bench, 2, ShardStrategy.ZIGZAG), *PLANS[plan])


@pytest.mark.parametrize("size", [2, 4])
def test_i1_shared_selections_and_deep_padding(size: int) -> None:
    """Layers that share an earlier layer's lists; every rank padded far above its share."""
    bench = Bench("T2")
    assert_ranks_equal_one(bench, Ranks(bench, size), *PLANS["three ragged"], pad_to=40)


@pytest.mark.parametrize("size", [2, 4])
def test_i1_tokens_are_those_of_one_rank(size: int) -> None:
    """Greedy decoding of three requests, each step over all ranks (one row a request)."""
    bench = Bench()
    ranks = Ranks(bench, size)
    alone, shared = assert_ranks_equal_one(bench, ranks, *PLANS["three ragged"])
    for _ in range(6):
        for one in (*alone, *shared):
            if len(one.tokens) == one.done:
                one.tokens.append(1)  # the first token after the prompt is given
        expected = bench.step([(one, 1) for one in alone])
        got = ranks.step([(one, 1) for one in shared])
        for left, right in zip(alone, shared, strict=True):
            at = (left.name, left.done - 1)
            left.tokens.append(bench.greedy(expected[at]))
            right.tokens.append(bench.greedy(got[at]))
    assert [one.tokens for one in shared] == [one.tokens for one in alone]


@pytest.mark.parametrize("size", [2, 3])
def test_i1_captured_style_replay_on_ranks(size: int) -> None:
    """Decodes of 7, 5, 1 and 7 requests: each rank replays one captured shard, refreshed."""
    bench = Bench(num_pages=200)
    lengths = [5 + 4 * i for i in range(7)]
    requests = [bench.request(f"r{i}", token_list(n + 4, i)) for i, n in enumerate(lengths)]
    shared = [Request(one.name, one.tokens, one.pages) for one in requests]
    ranks = Ranks(bench, size)
    bench.step(list(zip(requests, lengths, strict=True)))
    ranks.step(list(zip(shared, lengths, strict=True)))
    largest = bench.geometry([(replace(one, done=len(one.tokens) - 1), 1) for one in requests])
    each = -(-7 // size) + 1
    captured = [
        CapturedStep(bench, shard_rows(largest, rank, size, rows_per_rank=each), ranks.caches[rank])
        for rank in range(size)
    ]
    for live in (7, 5, 1, 7):
        expected = bench.step([(one, 1) for one in requests[:live]])
        whole = bench.geometry([(one, 1) for one in shared[:live]])

        def one_rank(rank: SimulatedRank, whole: Geometry = whole) -> dict[Token, Tensor]:
            shard = shard_rows(whole, rank.rank, size, rows_per_rank=each)
            mine = captured[rank.rank]
            mine.refresh(shard, bench.token_ids(shard, shared))
            hidden = mine.replay(all_gather=rank.all_gather)
            return rows_by_token(RowTensor(shard.rows, hidden), shared)

        parts, _ = run_ranks(size, one_rank)
        assert_same_rows(dict(sorted(expected.items())), dict(sorted(merged(parts).items())))
        for one in shared[:live]:
            one.done += 1
        for cache in ranks.caches:
            assert_caches_equal(bench.pools, cache)


def merged(parts: Sequence[dict[Token, Tensor]]) -> dict[Token, Tensor]:
    return {token: row for part in parts for token, row in part.items()}


def test_i1_padding_rows_select_nothing() -> None:
    """Padding rows of every rank emit -1 alone; every other id is a key that its row sees."""
    bench = Bench()
    ranks = Ranks(bench, 2)
    alone = requests_of(bench, (31,))
    lists: list[Any] = []

    class Watch(RecordingTap):
        def index(self, layer: int, selection: Any) -> Any:
            lists.append(selection.keys)
            return super().index(layer, selection)

    for n in (16, 15):
        whole = bench.geometry([(alone[0], n)])
        for rank in range(2):
            shard = shard_rows(whole, rank, 2, rows_per_rank=10)
            bench.forward(
                shard,
                alone,
                all_gather=lambda x: torch.cat([x] * 2),
                pools=ranks.caches[rank],
                tap=Watch(),
            )
        alone[0].done += n
    for keys in lists:
        keys.check()
        padding = ~keys.axis.is_live()
        assert int(padding.sum()) in (2, 3)
        assert bool((keys.segments[0].ids[padding] == -1).all())


def test_i1_every_chunk_stays_sparse() -> None:
    """No shard, padded or of several requests, is planned dense once its keys pass K."""
    bench = Bench()
    k = bench.config.index_topk
    requests = requests_of(bench, (k + 3, 40, k + 1))
    requests[1].done = 30
    whole = bench.geometry([(one, len(one.tokens) - one.done) for one in requests])
    for rank in range(3):
        shard = shard_rows(whole, rank, 3, rows_per_rank=20)
        plan = plan_step(shard, bench.config.attention_dims())
        assert plan.dense is None
        assert set(plan.routes) == {Route.SPARSE}


def test_i1_a_shard_without_its_collective_is_refused() -> None:
    bench = Bench()
    one = bench.request("a", token_list(9))
    shard = shard_rows(bench.geometry([(one, 9)]), 0, 2)
    with pytest.raises(GeometryError, match="gathers the rows of 2 ranks, but this step has no"):
        bench.forward(shard, [one], policy=NEVER)
    with pytest.raises(GeometryError, match="was put on row axis"):
        bench.forward(shard, [one], all_gather=lambda x: x)  # a group of size 1: another's group
