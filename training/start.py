"""Training that starts from a shipped model: the inverse of export.

In:  a model folder as `training.export` writes it (model.safetensors under the hub's names).
Out: parameters filled in place; what was bfloat16 is float32 of the same value, so that exporting
     at once gives the same tensors.
Not here: the optimiser's state, which a model folder has not (checkpoint has it); gnomon, which a
training machine need not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from training.parameters import Parameters

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_RENAMED = {
    "embed.weight": "embed_tokens.weight",
    "input_norm.": "input_layernorm.",
    "post_norm.": "post_attention_layernorm.",
    "attn.q_a.": "self_attn.q_a_proj.",
    "attn.q_a_norm.": "self_attn.q_a_layernorm.",
    "attn.q_b.": "self_attn.q_b_proj.",
    "attn.kv_a.": "self_attn.kv_a_proj_with_mqa.",
    "attn.kv_a_norm.": "self_attn.kv_a_layernorm.",
    "attn.kv_b.": "self_attn.kv_b_proj.",
    "attn.o.": "self_attn.o_proj.",
    "indexer.": "self_attn.indexer.",
    "router.weight": "mlp.gate.weight",
    "router.bias": "mlp.gate.e_score_correction_bias",
}
_HALVES = ("gate_proj", "up_proj")  # of gate_up, rows of the first half and of the second


def fill(params: Parameters, folder: Path) -> None:
    """Give every parameter its stored value. ValueError: what is stored is not of this shape."""
    stored = read_tensors(folder / "model.safetensors")
    with torch.no_grad():
        for name, value in params.items():
            for key, place in _pieces(name, value):
                if key not in stored or stored[key].shape != place.shape:
                    got = list(stored[key].shape) if key in stored else "nothing"
                    raise ValueError(
                        f"{folder} has {got} as {key}, and {list(place.shape)} is needed for "
                        f"{name}: choose the plan whose shape this model has."
                    )
                place.copy_(stored.pop(key))
    if stored:
        raise ValueError(f"{folder} has tensors that the plan's shape has not: {sorted(stored)[0]}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        dtype = DTYPES[about["dtype"]]
        data = torch.frombuffer(raw, dtype=torch.uint8, offset=start + begin, count=end - begin)
        found[name] = data.clone().view(dtype).view(about["shape"])
    return found


def _pieces(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of a parameter: their names and the parts of it that they fill."""
    prefix, inner = "model.", name
    if name.startswith("layers."):
        _, layer, inner = name.split(".", 2)
        prefix += f"layers.{layer}."
    if name == "lm_head.weight":
        yield name, value
    elif inner in ("experts.gate_up", "experts.down"):
        for expert, matrix in enumerate(value):
            here = f"{prefix}mlp.experts.{expert}."
            yield from _halves(here, inner.removeprefix("experts."), matrix)
    elif inner.endswith(("gate_up.weight", "mlp.down.weight", "shared.down.weight")):
        block, part, _ = inner.rsplit(".", 2)
        here = "mlp." if block == "mlp" else "mlp.shared_experts."
        yield from _halves(prefix + here, part, value)
    else:
        for own, hub in _RENAMED.items():
            if inner.startswith(own):
                inner = hub + inner.removeprefix(own)
                break
        yield prefix + inner, value


def _halves(here: str, part: str, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A SwiGLU's matrix: down as it is, gate and up in one."""
    if part == "down":
        yield f"{here}down_proj.weight", matrix
        return
    for half, rows in zip(_HALVES, matrix.chunk(2), strict=True):
        yield f"{here}{half}.weight", rows
