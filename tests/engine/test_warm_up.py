"""The warm-up runs within the engine's limits, takes every way, and leaves no trace in answers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.routes import Route
from gnomon.engine.core import EngineCore
from gnomon.engine.warm_up import warm_up
from gnomon.engine.warm_up_shapes import Room, ladder, mixtures, numbers, shapes
from tests.engine.graph_engine import graph_core, graph_parts
from tests.engine.tiny_engine import outputs, prompt, request


@given(
    st.integers(1, 4096),
    st.integers(1, 300),
    st.integers(2, 10**6),
    st.tuples(st.integers(1, 10**4), st.sampled_from([1, 16, 64])),
    st.integers(0, 4096),
    st.integers(0, 1024),
)
def test_no_step_passes_a_limit(max_tokens, max_seqs, max_len, pages, topk, captured):
    max_seqs, (num_pages, page_size) = min(max_seqs, max_tokens), pages
    room = Room(
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_len=max_len,
        num_pages=num_pages,
        page_size=page_size,
        topk=topk,
    )
    for work in [*shapes(room), *ladder(room, captured), *mixtures(room)]:
        assert 1 <= sum(rows for rows, _ in work) <= max_tokens
        assert len(work) <= max_seqs
        assert all(1 <= rows <= length <= max_len for rows, length in work)
        assert sum(-(-length // page_size) for _, length in work) <= num_pages


def test_mixtures_climb_in_both_kinds():
    room = Room(max_tokens=2048, max_seqs=24, max_len=6144, num_pages=1152, page_size=64, topk=2048)
    works = mixtures(room)
    decoding = [len(work) for work in works if all(rows == 1 for rows, _ in work)]
    assert decoding == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22]
    beside = [work for work in works if work[0][0] > 1]
    assert [work[1][0] for work in beside] == [2**power for power in range(1, 11)]
    assert {work[0] for work in beside} == {(1024, 1024)}
    assert {work[1][1] for work in beside} == {6144}


@pytest.mark.parametrize("captured_tokens", [0, 12])
@pytest.mark.parametrize("flags", [{}, {"num_kv_pages": 3}, {"max_num_batched_tokens": 12}])
def test_answers_are_those_of_an_engine_without_it(flags, captured_tokens):
    requests = [request(f"r{i}", prompt(5 + 7 * i, i), 6) for i in range(3)]
    parts = graph_parts(captured_tokens=captured_tokens, **flags)
    stages = []
    warm_up(parts, lambda *stage: stages.append(stage))
    name, done, total = stages[-1]
    assert (name, done) == ("warm-up", total)
    assert outputs(EngineCore(parts), requests) == outputs(graph_core(**flags), requests)


def test_captured_steps_of_all_sizes_are_run_fresh_and_behind_a_context():
    parts = graph_parts(captured_tokens=32, max_num_batched_tokens=64)
    graphs, seen = parts.runner._prefill, []
    forward = graphs.forward

    def watching(batch, *rest):
        seen.append((batch.geometry.rows.num_rows, batch.geometry.requests.host.kv_len))
        return forward(batch, *rest)

    graphs.forward = watching
    warm_up(parts, lambda *_: None)
    longest = parts.scheduler.config.max_model_len
    topk = parts.builder.rules.dims.index_topk
    for rows in numbers(32, 4):
        if parts.runner._prefill.bucket_of(rows) is not None:
            assert {(rows, (rows,)), (rows, (longest,))} <= set(seen)
    for rows in numbers(32, 8):
        if parts.runner._prefill.bucket_of(rows) is not None:
            assert (rows, (rows + topk,)) in seen


@given(st.integers(0, 10000), st.sampled_from([4, 8]))
def test_numbers_leave_no_great_gap(most, part):
    found = list(numbers(most, part))
    assert all(2 <= number <= most for number in found)
    for one, other in pairwise([*found, most + 1]):
        assert other <= one + max(1, one // part)


@pytest.mark.parametrize("most", [64, 200])
def test_both_routes_are_taken(most):
    parts = graph_parts(model="random:deepseek_v32,layers=2,topk=64", max_num_batched_tokens=most)
    seen: set[Route] = set()
    run = parts.runner.run

    def watching(batch, *rest, **named):
        seen.update(batch.plan.routes)
        return run(batch, *rest, **named)

    parts.runner.run = watching
    warm_up(parts, lambda *_: None)
    assert seen == {Route.DENSE, Route.SPARSE}
