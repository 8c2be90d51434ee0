"""Top-k, min-p and top-p of a row, as the last token that they keep.

In:  float32 logits [M, V], already penalised; per row a temperature > 0, top-k (V = off), top-p
     in (0, 1], min-p in [0, 1].
Out: int64 [M]: the token that ends what is kept; of a row without a finite maximum any id.
Maths: the kept tokens are a prefix of the order "logit descending, then token id": top-k keeps k
of them; min-p those of at least min_p times the greatest probability; top-p, taken over what these
two left, the shortest prefix whose mass reaches top_p. Mass is float64.
Cost: a row first looks at its `NUM_LEADING` best and sorts the whole vocabulary only if the edge
lies beyond. That asks the device, so a GPU has its own way: sampling_edges_triton.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.engine.sampling_order import leading_tokens

NUM_LEADING = 256


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """What to keep of each row's distribution."""

    temperature: Tensor  # [M] float64, > 0
    top_k: Tensor  # [M] int64, V where it is off
    top_p: Tensor  # [M] float64
    min_p: Tensor  # [M] float64

    def rows(self, index: Tensor) -> Filters:
        """The filters of the given rows only."""
        return Filters(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index]
        )


def last_kept(logits: Tensor, filters: Filters) -> Tensor:
    """One token id per row (module docstring)."""
    token_ids, is_settled = _last_of_leading(logits, filters, NUM_LEADING)
    if not bool(is_settled.all()):
        rest = (~is_settled).nonzero().squeeze(-1)
        whole = _last_of_leading(logits[rest], filters.rows(rest), logits.shape[-1])
        token_ids[rest] = whole[0]
    return token_ids


def _last_of_leading(logits: Tensor, filters: Filters, width: int) -> tuple[Tensor, Tensor]:
    """Token ids [M] and whether the first `width` tokens of the order were enough to know them."""
    num_tokens = logits.shape[-1]
    width = min(width, num_tokens)
    exponent = (logits.double() - logits.amax(-1, keepdim=True)) / filters.temperature[:, None]
    weights = exponent.exp_()
    weights = weights.masked_fill_(weights < filters.min_p[:, None], 0.0)
    ids = leading_tokens(logits, width)
    column = torch.arange(width, device=logits.device)
    leading = weights.gather(-1, ids)
    leading = leading.masked_fill_(column >= filters.top_k[:, None], 0.0)

    mass = leading.cumsum(-1)
    # Closed: every token that top-k and min-p keep is among the leading ones.
    is_closed = (filters.top_k <= width) | (leading[:, -1] == 0.0)
    total = torch.where(is_closed, mass[:, -1], weights.sum(-1))
    is_known = is_closed | (filters.top_k >= num_tokens)

    has_top_p = filters.top_p < 1.0
    cut = filters.top_p * total
    edge = (mass < cut[:, None]).sum(-1).clamp_(max=width - 1)
    is_settled = is_closed | (is_known & has_top_p & (mass[:, -1] >= cut))
    last = (leading > 0.0).sum(-1) - 1
    last = torch.where(has_top_p, torch.minimum(last, edge), last)
    last = last.clamp_min_(0)  # a row of NaN has no last: any will do
    return ids.gather(-1, last[:, None]).squeeze(-1), is_settled
