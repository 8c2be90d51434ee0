"""StepSchedule to Batch against plain loops; the host page table against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.attention.routes import AttentionDims
from gnomon.engine.batch import BatchBuilder, BatchRules, HostPageTable
from gnomon.engine.messages import EngineRequest
from gnomon.engine.request import SpanTable
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.schedule_step import ScheduledRequest, StepSchedule
from gnomon.errors import GeometryError

PAGE = 4
DIMS = AttentionDims(2, 8, 4, 4, 4, index_topk=8, index_num_heads=2, index_head_dim=4)


class FakeSpan:
    """A span as SpanTable reads it."""

    def __init__(self, page: int) -> None:
        self.pages = ((page,),)


def item(name, tokens, num_prompt, computed, new, pages, **params) -> ScheduledRequest:
    request = EngineRequest(
        request_id=name, prompt_token_ids=tokens[:num_prompt], params=SamplingParams(**params)
    )
    return ScheduledRequest(
        request=request,
        num_computed=computed,
        num_new_tokens=new,
        token_ids=tokens[computed : computed + new],
        pages=(np.array(pages, np.int32),),
        needs_sample=computed + new >= num_prompt,
        tokens=tokens,
    )


def schedule(*items: ScheduledRequest) -> StepSchedule:
    num_tokens = sum(one.num_new_tokens for one in items)
    return StepSchedule(step_id=1, items=items, groups=("tokens",), num_tokens=num_tokens)


def builder(**rules) -> BatchBuilder:
    made = BatchRules(dims=DIMS, page_size=PAGE, device=torch.device("cpu"), **rules)
    return BatchBuilder(made, ["tokens"])


REQUESTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 29), st.integers(1, 30)), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(shapes=REQUESTS, multiple=st.sampled_from([1, 16]))
def test_rows_slots_and_samples(shapes, multiple):
    """Every live row has its token, position and slot; the rest is padding."""
    items, expected = [], []
    for index, (num_prompt, computed, new) in enumerate(shapes):
        tokens = [100 * index + place for place in range(60)]
        num_pages = -(-(computed + new) // PAGE)
        pages = [1 + 20 * index + place for place in range(num_pages)]
        items.append(item(f"r{index}", tokens, num_prompt, computed, new, pages))
        for position in range(computed, computed + new):
            slot = pages[position // PAGE] * PAGE + position % PAGE
            expected.append((index, position, tokens[position], slot))
    batch = builder(row_multiple=multiple).build(schedule(*items))
    batch.geometry.check()
    rows, num_live = batch.geometry.rows, len(expected)
    assert rows.num_rows == -(-num_live // multiple) * multiple
    slots = batch.geometry.writes["tokens"].slots
    columns = (rows.request, rows.position, batch.token_ids.data, slots)
    assert list(zip(*(c[:num_live].tolist() for c in columns), strict=True)) == expected
    padding = [c[num_live:].unique().tolist() for c in columns]
    assert padding in ([[-1], [0], [0], [-1]], [[], [], [], []])
    ends = np.cumsum([one.num_new_tokens for one in items]) - 1
    sampling = [i for i, one in enumerate(items) if one.needs_sample]
    assert batch.logit_rows.tolist() == [ends[i] for i in sampling]
    assert [row.position for row in batch.samples] == [items[i].kv_len for i in sampling]
    assert batch.request_ids == tuple(one.request_id for one in items)


def test_prompt_rows_are_those_before_the_last_prompt_token():
    """A prompt of 7 scored in chunks of 3: tokens 1-3, 4-6, and nothing for outputs."""
    tokens = list(range(50, 62))
    made = builder()

    def scored(computed, new):
        one = item("r", tokens, 7, computed, new, [1, 2, 3], prompt_logprobs=0)
        other = item("s", tokens, 7, computed, new, [4, 5, 6])
        return made.build(schedule(other, one)).prompt_rows

    (part,) = scored(0, 3)
    assert (part.first, part.next_ids, list(part.rows)) == (1, (51, 52, 53), [3, 4, 5])
    (part,) = scored(3, 4)
    assert (part.first, part.next_ids, list(part.rows)) == (4, (54, 55, 56), [4, 5, 6])
    assert scored(6, 1) == ()
    assert scored(7, 1) == ()


def test_a_prompt_of_one_token_has_an_empty_score():
    one = item("r", [5, 6, 7], 1, 0, 1, [1], prompt_logprobs=0)
    (part,) = builder().build(schedule(one)).prompt_rows
    assert (part.first, part.next_ids, list(part.rows)) == (1, (), [])
    later = item("r", [5, 6, 7], 1, 1, 1, [1], prompt_logprobs=0)
    assert builder().build(schedule(later)).prompt_rows == ()


def test_a_missing_page_is_an_error():
    with pytest.raises(GeometryError, match="page"):
        builder().build(schedule(item("r", list(range(9)), 9, 0, 9, [1, 2])))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_host_page_table_follows_growing_and_replaced_pages(data):
    """Lines equal the request's pages, zero behind them, through growth, swaps, restarts, ends."""
    table, spans, next_page = HostPageTable(), {}, 1
    for _ in range(data.draw(st.integers(1, 40))):
        name = data.draw(st.sampled_from("abcdefghijk"))
        action = data.draw(st.sampled_from(["grow", "grow", "swap", "restart", "end"]))
        own = spans.get(name)
        if action == "end":
            spans.pop(name, None)
            table.drop(name)
            continue
        if own is None:
            own = spans[name] = SpanTable((1,))
        if action == "swap" and len(own):
            own.replace(data.draw(st.integers(0, len(own) - 1)), FakeSpan(next_page))
        else:
            if action == "restart":
                own = spans[name] = SpanTable((1,))
            count = data.draw(st.integers(1, 12))
            own.extend([FakeSpan(next_page + place) for place in range(count)])
        next_page += 20
        names = data.draw(st.lists(st.sampled_from(sorted(spans)), unique=True, min_size=1))
        names = [one for one in names if len(spans[one])]
        items = [item(one, [1], 1, 0, 1, []) for one in names]
        items = [
            ScheduledRequest(
                request=one.request, num_computed=0, num_new_tokens=1, token_ids=[1],
                pages=spans[one.request_id].views, needs_sample=True, tokens=[1],
            )
            for one in items
        ]  # fmt: skip
        lines = table.lines(items, 0)
        width = max((len(spans[one]) for one in names), default=0)
        assert lines.shape == (len(names), width)
        for line, one in zip(lines.tolist(), names, strict=True):
            pages = [span.pages[0][0] for span in spans[one].spans]
            assert line == pages + [0] * (width - len(pages))
