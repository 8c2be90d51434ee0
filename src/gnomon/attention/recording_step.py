"""Geometry and plan of a recorded step: to JSON and back.

In:  a RecordedStep and a function that stores a tensor and returns its name; or what came of it.
Out: plain values. The geometry comes back as a Geometry (its cheap checks run again), the plan as
     plain values, for the reader: routes, chunks, widths, bytes.
Not here: the operator calls (recording_header.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.axes import HostLengths, RequestAxis, RowAxis, RowSpan
from gnomon.attention.geometry import Geometry, PageTable, WriteSlots
from gnomon.attention.ownership import KeyOwnership
from gnomon.attention.plan import PagedScoreChunk, StepPlan
from gnomon.attention.recording import RecordedStep

Json = dict[str, Any]
Put = Callable[[Tensor], str]
Tensors = Mapping[str, Tensor]


def plan_values(plan: StepPlan) -> Json:
    """The plan as plain values; row numbers of its subsets as lists."""

    def rows(subset: Any) -> Any:
        if subset is None:
            return None
        return "all" if subset.rows is None else subset.rows.tolist()

    return {
        "group": plan.group,
        "routes": [str(route) for route in plan.routes],
        "sparse_rows": rows(plan.sparse),
        "dense_rows": rows(plan.dense),
        "index_width": plan.index_width,
        "score_chunks": [
            {"kind": "paged" if isinstance(chunk, PagedScoreChunk) else "contiguous"}
            | asdict(chunk)
            for chunk in plan.score_chunks
        ],
        "context_chunks": [
            {
                "gathers": [gather._asdict() for gather in chunk.gathers],
                "pieces": [piece._asdict() for piece in chunk.pieces],
            }
            for chunk in plan.context_chunks
        ],
        "scratch_bytes": plan.scratch_bytes,
        "bucket": plan.bucket,
        "graph_key": None if plan.graph_key is None else asdict(plan.graph_key),
    }


def encode_step(step: RecordedStep, put: Put) -> Json:
    """Plain values of a step."""
    geometry = step.geometry
    axes = [geometry.rows]
    writes = {}
    for group, written in geometry.writes.items():
        for axis in (written.axis, written.local):
            if axis is not None and not any(axis is known for known in axes):
                axes.append(axis)
        writes[group] = {
            "slots": put(written.slots),
            "axis": _place(axes, written.axis),
            "local": None if written.local is None else _place(axes, written.local),
        }
    return {
        "step_id": step.step_id,
        "request_ids": None if step.request_ids is None else list(step.request_ids),
        "token_ids": None if step.token_ids is None else put(step.token_ids),
        "plan": step.plan,
        "requests": asdict(geometry.requests.host)
        | {"device": [put(geometry.requests.query_len), put(geometry.requests.kv_len)]},
        "axes": [_encode_axis(axis, put) for axis in axes],
        "tables": {
            group: {
                "pages": put(table.pages),
                "page_size": table.page_size,
                "tokens_per_entry": table.tokens_per_entry,
                "window": table.window,
                "ownership": None if table.ownership is None else asdict(table.ownership),
            }
            for group, table in geometry.tables.items()
        },
        "writes": writes,
    }


def decode_step(entry: Json, tensors: Tensors) -> RecordedStep:
    """The step that ``encode_step`` made this of."""
    axes = [_decode_axis(axis, tensors) for axis in entry["axes"]]
    host = entry["requests"]
    query_len, kv_len = (tensors[name] for name in host["device"])
    lengths = HostLengths(tuple(host["query_len"]), tuple(host["kv_len"]), bool(host["is_exact"]))
    tables = {}
    for group, table in entry["tables"].items():
        owner = table["ownership"]
        tables[group] = PageTable(
            group,
            tensors[table["pages"]],
            table["page_size"],
            table["tokens_per_entry"],
            table["window"],
            None if owner is None else KeyOwnership(**owner),
        )
    writes = {
        group: WriteSlots(
            axes[written["axis"]],
            tensors[written["slots"]],
            None if written["local"] is None else axes[written["local"]],
        )
        for group, written in entry["writes"].items()
    }
    names, tokens = entry["request_ids"], entry["token_ids"]
    return RecordedStep(
        step_id=int(entry["step_id"]),
        geometry=Geometry(RequestAxis(query_len, kv_len, lengths), axes[0], tables, writes),
        plan=dict(entry["plan"]),
        request_ids=None if names is None else tuple(str(name) for name in names),
        token_ids=None if tokens is None else tensors[tokens],
    )


def _place(axes: list[RowAxis], axis: RowAxis) -> int:
    return next(place for place, known in enumerate(axes) if known is axis)


def _encode_axis(axis: RowAxis, put: Put) -> Json:
    return {
        "label": axis.label,
        "request": put(axis.request),
        "position": put(axis.position),
        "kv_len": put(axis.kv_len),
        "num_live": axis.num_live,
        "spans": [list(span) for span in axis.spans],
        "is_exact": axis.is_exact,
        "rank_rows": list(axis.rank_rows),
    }


def _decode_axis(entry: Json, tensors: Tensors) -> RowAxis:
    request, position, kv_len = (tensors[entry[k]] for k in ("request", "position", "kv_len"))
    return RowAxis(
        request=request.to(torch.int32),
        position=position.to(torch.int32),
        kv_len=kv_len.to(torch.int32),
        num_live=int(entry["num_live"]),
        spans=tuple(RowSpan(*span) for span in entry["spans"]),
        label=str(entry["label"]),
        is_exact=bool(entry["is_exact"]),
        rank_rows=tuple(entry["rank_rows"]),
    )
