"""The model that is trained is the model that is served: logits, choices of keys, both families.

Oracle: gnomon's engine over the exported parameters, in float32, which is itself tested against
transformers. Prompts are longer than index_topk, so that the selection takes part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.engine.config import EngineConfig
from gnomon.engine.core import build_core
from gnomon.engine.messages import EngineRequest
from gnomon.engine.runner import Taps
from gnomon.engine.sampling_params import SamplingParams
from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.params import param_specs
from training.attention import attend
from training.blocks import Projected
from training.model import Model
from training.parameters import Parameters, initial_parameters, parameter_shapes
from training.selection import Choice, scores_of, select
from training.shapes import CONFIGS, Shape

SMALL = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 300, "index_topk": 16}


class EveryRow:
    """Keeps the logits of all rows by position."""

    wants_every_row = True

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def logits(self, request_ids: Any, positions: Any, logits: Tensor) -> None:
        self.rows |= {p: row.clone() for p, row in zip(positions, logits, strict=True)}


def small(name: str) -> dict[str, Any]:
    eos = {"bos_token_id": None, "eos_token_id": None}
    return {**CONFIGS[name], **SMALL, **eos, "torch_dtype": "float32"}


def lively(shape: Shape) -> Parameters:
    """Parameters with no part at rest: norms away from 1, biases away from 0, wide outputs."""
    dice = torch.Generator().manual_seed(1)
    params = initial_parameters(shape, 0, "cpu")
    with torch.no_grad():
        for name, value in params.items():
            if value.dim() == 1:
                value.add_(torch.randn(value.shape, generator=dice) * 0.1)
            elif "down" in name or name.endswith("attn.o.weight"):
                value.mul_(4.0)
    return params


def served_logits(folder: Path, ids: list[int]) -> Tensor:
    """[T, V] of a folder, by gnomon's engine."""
    core = build_core(EngineConfig.of(model=str(folder), tokenizer="none", num_kv_pages=16))
    rows = EveryRow()
    core.taps = Taps(logits=rows)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    core.add([EngineRequest(request_id="a", prompt_token_ids=ids, params=params)])
    while core.has_work:
        core.step()
    return torch.stack([rows.rows[place] for place in range(len(ids))])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    config = small(name)
    shape = Shape.of(config)
    params = lively(shape)
    save_checkpoint(tmp_path, read_config(config), params)
    ids = torch.randint(3, 300, (1, 90), generator=torch.Generator().manual_seed(2))
    model = Model(shape, "cpu", torch.float32)
    with torch.no_grad():
        hidden = model.hidden(params, ids, model.start(ids, Choice.EXACT))
        dense = model.hidden(params, ids, model.start(ids, None))
    ours = hidden @ params["lm_head.weight"].T
    theirs = served_logits(tmp_path, ids[0].tolist())
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    assert (dense - hidden)[20:].abs().max() > 0.1, "the selection changes nothing: a vacuous test"


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_names_and_shapes_are_those_of_the_engine(name: str) -> None:
    config = CONFIGS[name]
    ours = parameter_shapes(Shape.of(config))
    theirs = {spec.name: spec.shape for spec in param_specs(read_config(config))}
    assert {key: ours[key] for key in theirs} == theirs
    extra = f"layers.{config['num_hidden_layers']}."
    assert all(key.startswith(extra) for key in ours.keys() - theirs.keys())


def rows_of(shape: Shape, batch: int, length: int) -> Projected:
    dice = torch.Generator().manual_seed(3)

    def noise(*size: int) -> Tensor:
        return torch.randn(batch * length, *size, generator=dice)

    return Projected(
        noise(shape.heads, shape.nope),
        noise(shape.heads, shape.rope),
        noise(shape.kv_rank),
        noise(shape.rope),
        noise(shape.index_heads, shape.index_dim),
        noise(shape.index_dim),
        noise(shape.index_heads),
    )


def test_both_sparse_forms_and_their_gradients_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape.of(small("tiny"))
    rows, batch, length = rows_of(shape, 2, 40), 2, 40
    kv_b = torch.randn(shape.heads * (shape.nope + shape.value), shape.kv_rank)
    chosen = select((rows.index_q, rows.index_k, rows.index_w), batch, shape, Choice.EXACT)
    assert chosen.shape == (batch, length, shape.topk)
    found = []
    for limit in (1024, 0):
        monkeypatch.setattr("training.attention.MASKED_UP_TO", limit)
        leaves = [part.clone().requires_grad_() for part in rows[:4]]
        weight = kv_b.clone().requires_grad_()
        out = attend(Projected(*leaves, *rows[4:]), weight, batch, chosen, shape)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in (*leaves, weight))])
    for masked, gathered in zip(*found, strict=True):
        torch.testing.assert_close(masked, gathered, atol=1e-3, rtol=1e-4)


def test_the_selection_holds_the_best_scores_that_a_row_sees() -> None:
    shape = Shape.of(small("tiny"))
    rows, batch, length = rows_of(shape, 2, 40), 2, 40
    query = rows.index_q.view(batch, length, shape.index_heads, -1)
    weight = rows.index_w.view(batch, length, -1)
    key = rows.index_k.view(batch, length, -1)
    plain = torch.einsum("bth,bthd,bsd->bths", weight * 0 + 1, query, key).relu()
    plain = (plain * weight[..., None]).sum(2) * (shape.index_heads * shape.index_dim) ** -0.5
    torch.testing.assert_close(scores_of(query, weight, key, shape), plain, atol=1e-5, rtol=1e-5)
    chosen = select((rows.index_q, rows.index_k, rows.index_w), batch, shape, Choice.EXACT)
    for row in range(length):
        seen = plain[0, row, : row + 1]
        best = set(seen.topk(min(shape.topk, row + 1)).indices.tolist())
        assert best == {place for place in chosen[0, row].tolist() if place <= row}
