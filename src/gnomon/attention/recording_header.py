"""The JSON of a recording: every value but the tensors' numbers, and the way back.

In:  a Recording and a store that gives tensors names; or that JSON and the tensors by name.
Out: plain dicts, lists, strings and integers (floats as hexadecimal text, so that they come back
     to the bit, NaN and infinities too); or the Recording.
Errors of the way back are whatever a missing or misshapen entry raises; recording_file.py says so
in one sentence.
Not here: bytes and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor

from gnomon.attention.axes import RowAxis, spans_of
from gnomon.attention.layouts.base import KVLayout
from gnomon.attention.layouts.registry import IndexKeyDims, LatentDims, candidates
from gnomon.attention.ops.values import IndexTransform, RopeRows
from gnomon.attention.recording import PoolPart, RecordedCall, Recording
from gnomon.attention.recording_calls import SHAPES, only_named_experts
from gnomon.attention.recording_capture import WIDEST_GAP, with_stride
from gnomon.attention.recording_step import decode_step, encode_step
from gnomon.attention.routes import AttentionDims
from gnomon.errors import LayoutError

Json = dict[str, Any]
Tensors = Mapping[str, Tensor]


class TensorStore(Protocol):
    """Where the numbers of tensors go."""

    def put(self, tensor: Tensor) -> str:
        """Keep a tensor; its name."""


def encode_recording(recording: Recording, store: TensorStore) -> Json:
    """Everything but the numbers of tensors."""
    return {
        "origin": dict(recording.origin),
        "dims": asdict(recording.dims),
        "hidden_size": recording.hidden_size,
        "providers": dict(recording.providers),
        "reason": recording.reason,
        "error": recording.error,
        "is_redacted": recording.is_redacted,
        "step": None if recording.step is None else encode_step(recording.step, store.put),
        "calls": [_encode_call(call, store) for call in recording.calls],
    }


def decode_recording(header: Json, tensors: Tensors) -> Recording:
    """The recording that ``encode_recording`` made this of."""
    dims = AttentionDims(**header["dims"])
    step = header["step"]
    return Recording(
        origin={str(key): str(value) for key, value in header["origin"].items()},
        dims=dims,
        hidden_size=int(header["hidden_size"]),
        providers={str(key): str(value) for key, value in header["providers"].items()},
        calls=tuple(_decode_call(call, tensors, dims) for call in header["calls"]),
        step=None if step is None else decode_step(step, tensors),
        reason=str(header["reason"]),
        error=str(header["error"]),
        is_redacted=bool(header["is_redacted"]),
    )


def _encode_call(call: RecordedCall, store: TensorStore) -> Json:
    results, arguments = call.results, call.arguments
    if call.op == "moe" and arguments:
        arguments = only_named_experts(arguments)
    return {
        "op": call.op,
        "layer": call.layer,
        "part": call.part,
        "arguments": [_encode_value(value, store) for value in arguments],
        "results": None
        if results is None
        else {name: _encode_value(tensor, store) for name, tensor in results.items()},
        "rows": {group: store.put(rows) for group, rows in call.rows.items()},
        "error": call.error,
        "withheld": call.withheld,
    }


def _decode_call(entry: Json, tensors: Tensors, dims: AttentionDims) -> RecordedCall:
    if entry["op"] not in SHAPES:
        raise ValueError(f"no operator is called {entry['op']!r}")
    results = entry["results"]
    rotations: dict[str, RopeRows] = {}
    return RecordedCall(
        op=entry["op"],
        layer=None if entry["layer"] is None else int(entry["layer"]),
        part=entry["part"],
        arguments=tuple(
            _decode_value(value, tensors, dims, rotations) for value in entry["arguments"]
        ),
        results=None
        if results is None
        else {
            str(name): _decode_value(value, tensors, dims, rotations)
            for name, value in results.items()
        },
        rows={str(group): tensors[name] for group, name in entry["rows"].items()},
        error=str(entry["error"]),
        withheld=str(entry["withheld"]),
    )


def _encode_value(value: Any, store: TensorStore) -> Any:
    if isinstance(value, Tensor):
        if value.is_contiguous() or value.numel() == 0:
            return {"tensor": store.put(value)}
        return {"tensor": store.put(value), "stride": list(value.stride())}
    if isinstance(value, PoolPart):
        return {
            "pool": value.layout.versioned_id,
            "computed": str(value.layout.computed_dtype).removeprefix("torch."),
            "page_size": value.page_size,
            "page_ids": store.put(value.page_ids),
            "slots": store.put(value.slots),
            "entries": store.put(value.entries),
        }
    if isinstance(value, RopeRows):
        request, position = (torch.from_numpy(rows) for rows in value.axis.host_rows())
        return {
            "rope": [store.put(value.cos), store.put(value.sin)],
            "is_interleaved": value.is_interleaved,
            "axis": [value.axis.label, store.put(request), store.put(position)],
        }
    if isinstance(value, IndexTransform):
        return {
            "index_transform": [store.put(value.norm_weight), store.put(value.norm_bias)],
            "eps": float(value.norm_eps).hex(),
            "has_hadamard": value.has_hadamard,
        }
    if isinstance(value, tuple):
        return [_encode_value(one, store) for one in value]
    return value.hex() if isinstance(value, float) else value


def _decode_value(
    entry: Any, tensors: Tensors, dims: AttentionDims, rotations: dict[str, RopeRows]
) -> Any:
    if isinstance(entry, list):
        return tuple(_decode_value(one, tensors, dims, rotations) for one in entry)
    if isinstance(entry, str):
        return float.fromhex(entry)
    if not isinstance(entry, dict):
        return entry
    if "tensor" in entry:
        return _strided(tensors[entry["tensor"]], entry.get("stride"))
    if "rope" in entry:
        # The same rotations twice in one call are one value: kernels may look at identity.
        return rotations.setdefault(str(entry), _decode_rope(entry, tensors))
    if "index_transform" in entry:
        weight, bias = (tensors[name] for name in entry["index_transform"])
        return IndexTransform(
            weight, bias, float.fromhex(entry["eps"]), bool(entry["has_hadamard"])
        )
    return PoolPart(
        layout=_layout(entry["pool"], getattr(torch, entry["computed"]), dims),
        page_size=int(entry["page_size"]),
        page_ids=tensors[entry["page_ids"]],
        slots=tensors[entry["slots"]],
        entries=tensors[entry["entries"]],
    )


def _strided(tensor: Tensor, stride: list[int] | None) -> Tensor:
    if stride is None:
        return tensor
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, stride, strict=True))
    if min(stride) < 1 or span > WIDEST_GAP * tensor.numel():
        raise ValueError(f"strides {stride} of a tensor of shape {tuple(tensor.shape)}")
    return with_stride(tensor, tuple(stride))


def _decode_rope(entry: Json, tensors: Tensors) -> RopeRows:
    label, request_name, position_name = entry["axis"]
    request, position = tensors[request_name], tensors[position_name]
    spans = spans_of(request.numpy(), position.numpy())
    axis = RowAxis(
        request=request.to(torch.int32),
        position=position.to(torch.int32),
        kv_len=torch.where(request >= 0, position + 1, 0).to(torch.int32),
        num_live=sum(span.num_rows for span in spans),
        spans=spans,
        label=str(label),
    )
    cos, sin = (tensors[name] for name in entry["rope"])
    return RopeRows(axis, cos, sin, bool(entry["is_interleaved"]))


def _layout(versioned_id: str, dtype: torch.dtype, dims: AttentionDims) -> KVLayout:
    known = candidates(LatentDims(dims.kv_lora_rank, dims.qk_rope_head_dim), dtype)
    if dims.index_head_dim:
        known += candidates(IndexKeyDims(dims.index_head_dim), dtype)
    for layout in known:
        if layout.versioned_id == versioned_id:
            return layout
    raise LayoutError(f"no cache layout here is {versioned_id!r}")
