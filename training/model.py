"""The differentiable model: gnomon's decoder and its MTP layer over B whole sequences.

In:  token ids [B, T]; for training also the weight of each token as a target.
Out: hidden states after the final norm and of the MTP layer; losses.
Maths: oracle_math §1.1, §1.6, §1.8. Row t of the MTP layer sees the hidden state of token t and the
embedding of token t + 1, and guesses token t + 2. `tests/unit/training` compares with gnomon.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from training import blocks, losses
from training.attention import attend
from training.blocks import Projected, linear, rms_norm
from training.parameters import Parameters, of_layer
from training.rotary import rotary_table
from training.selection import Choice, select
from training.shapes import Shape

# What the two compiled halves of a layer take: no more, or each kind of layer is compiled anew.
BEFORE = ("input_norm.", "attn.q", "attn.kv_a", "indexer.")
AFTER = ("attn.o.", "post_norm.", "mlp.", "router.", "experts.", "shared.")


@dataclass(slots=True)
class Pass:
    """One forward pass: how rows choose keys (None: dense), and what it leaves behind."""

    batch: int
    rotary: tuple[Tensor, Tensor]
    choice: Choice | None
    picked: Tensor | None = None  # rows on which the indexers are taught
    divergence: list[Tensor] = field(default_factory=list)
    loads: dict[int, Tensor] = field(default_factory=dict)
    selections: list[Tensor] = field(default_factory=list)
    source: Projected | None = None
    chosen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Losses:
    """Scalars of one batch, and what was guessed right."""

    text: Tensor
    mtp: Tensor
    index: Tensor
    right: Tensor  # [B, T] bool: row t guesses token t + 1
    mtp_right: Tensor  # [B, T] bool: row t of the MTP layer guesses token t + 2


class Model:
    """A shape's functions, compiled or plain; parameters come with every call."""

    def __init__(self, shape: Shape, device: torch.device | str, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.device = torch.device(device)
        self.tables = rotary_table(shape, 8192, device)
        self.project, self.combine, self.next_token = (
            blocks.project, blocks.combine, losses.next_token,
        )  # fmt: skip

    def compile(self, backend: str) -> None:
        """Compile the token-wise functions; they must then always see one number of tokens."""
        self.project, self.combine, self.next_token = (
            torch.compile(function, dynamic=False, fullgraph=True, backend=backend)
            for function in (blocks.project, blocks.combine, losses.next_token)
        )

    def start(self, ids: Tensor, choice: Choice | None, picked: Tensor | None = None) -> Pass:
        """What every layer of a pass needs."""
        batch, length = ids.shape
        cos, sin = (table[:length].repeat(batch, 1) for table in self.tables)
        return Pass(batch, (cos, sin), choice, picked)

    def hidden(self, params: Parameters, ids: Tensor, run: Pass) -> Tensor:
        """[B * T, D] after the final norm."""
        x = params["embed.weight"].index_select(0, ids.flatten())
        for layer in range(self.shape.layers):
            x = self._layer(x, of_layer(params, layer), layer, run)
        return rms_norm(x, params["norm.weight"], self.shape.eps)

    def mtp_hidden(self, params: Parameters, ids: Tensor, hidden: Tensor, run: Pass) -> Tensor:
        """[B * T, D] of the MTP layer, ready for the head. Row T − 1 of a sequence is void."""
        shape, own = self.shape, of_layer(params, self.shape.mtp)
        following = params["embed.weight"].index_select(0, ids.roll(-1, 1).flatten())
        both = torch.cat(
            (
                rms_norm(following, own["enorm.weight"], shape.eps),
                rms_norm(hidden, own["hnorm.weight"], shape.eps),
            ),
            dim=-1,
        )
        x = linear(both, own["eh_proj.weight"], self.dtype).float()
        x = self._layer(x, own, shape.mtp, run)
        return rms_norm(x, own["shared_head.norm.weight"], shape.eps)

    def losses(
        self, params: Parameters, ids: Tensor, weight: Tensor, run: Pass, with_mtp: bool = True
    ) -> Losses:
        """All losses of ids [B, T]; weight [B, T] of each token as the target of the row before."""
        hidden = self.hidden(params, ids, run)
        text, right = self._guess(params, hidden, ids, weight, 1)
        mtp, mtp_right = text.new_zeros(()), right
        if with_mtp:
            ahead = self.mtp_hidden(params, ids, hidden, run)
            mtp, mtp_right = self._guess(params, ahead, ids, weight, 2)
        index = torch.stack(run.divergence).sum() if run.divergence else text.new_zeros(())
        return Losses(text, mtp, index, right.view_as(ids), mtp_right.view_as(ids))

    def _guess(
        self, params: Parameters, hidden: Tensor, ids: Tensor, weight: Tensor, ahead: int
    ) -> tuple[Tensor, Tensor]:
        weight = weight.roll(-ahead, 1).clone()
        weight[:, -ahead:] = 0.0
        target = ids.roll(-ahead, 1).flatten()
        return self.next_token(
            hidden, params["lm_head.weight"], target, weight.flatten(), self.dtype
        )

    def _layer(self, x: Tensor, w: Parameters, layer: int, run: Pass) -> Tensor:
        shape = self.shape
        interleaved = shape.index_interleaved != (run.choice is Choice.FLIPPED)
        before = {name: value for name, value in w.items() if name.startswith(BEFORE)}
        after = {name: value for name, value in w.items() if name.startswith(AFTER)}
        rows = self.project(x, before, run.rotary, shape, self.dtype, interleaved)
        if shape.index_source(layer) == layer:
            run.source = rows
            if run.choice is not None:
                index = (rows.index_q, rows.index_k, rows.index_w)
                run.chosen = select(index, run.batch, shape, run.choice)
        if run.choice is not None:
            run.selections.append(run.chosen)
        kv_b = w["attn.kv_b.weight"]
        if run.picked is not None:
            run.divergence.append(
                losses.index_divergence(rows, run.source, kv_b, run.picked, shape)
            )
        attended = attend(rows, kv_b, run.batch, run.chosen, shape)
        x, load = self.combine(x, attended, after, shape, self.dtype)
        if load.numel():
            run.loads[layer] = load
        return x
