"""Draw one token per row: temperature, top-k, min-p, top-p, then the inverse of the CDF.

In:  float32 logits [M, V], already penalised; per row a temperature
     > 0, top-k (0 or less = off), top-p in (0, 1], min-p in [0, 1], one uniform number in [0, 1).
Out: int64 [M] token ids; of a row without a finite maximum any id.
Maths: the kept tokens are a prefix of the order "probability descending, then token id":
top-k keeps k of them; min-p those of at least min_p times the greatest probability; top-p,
taken over what these two left, the shortest prefix whose mass reaches top_p. The token drawn is
the first whose cumulative mass exceeds uniform × kept mass. Mass is float64. A small uniform
number gives a likely token whatever the filters are, which keeps seeds comparable across them.
Cost: the order is needed only up to the drawn token, so a row first looks at its `NUM_LEADING`
best and sorts the whole vocabulary only if the draw, or a filter's edge, lies beyond.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.engine.sampling_order import leading_tokens

NUM_LEADING = 256


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """What to keep of each row's distribution, and the noise that picks from it."""

    temperature: Tensor  # [M] float64, > 0
    top_k: Tensor  # [M] int64, V where it is off
    top_p: Tensor  # [M] float64
    min_p: Tensor  # [M] float64
    uniform: Tensor  # [M] float64

    def rows(self, index: Tensor) -> Filters:
        """The filters of the given rows only."""
        return Filters(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniform[index],
        )


def draw(logits: Tensor, filters: Filters) -> Tensor:
    """One token id per row (module docstring)."""
    token_ids, is_settled = _draw_leading(logits, filters, NUM_LEADING)
    if not bool(is_settled.all()):
        rest = (~is_settled).nonzero().squeeze(-1)
        token_ids[rest] = _draw_leading(logits[rest], filters.rows(rest), logits.shape[-1])[0]
    return token_ids


def _draw_leading(logits: Tensor, filters: Filters, width: int) -> tuple[Tensor, Tensor]:
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

    total = weights.sum(-1)
    mass = leading.cumsum(-1)
    # Closed: every token that top-k and min-p keep is among the leading ones.
    is_closed = (filters.top_k <= width) | (leading[:, -1] == 0.0)
    is_known = is_closed | (filters.top_k >= num_tokens)
    total = torch.where(is_closed, mass[:, -1], total)

    has_top_p = filters.top_p < 1.0
    cut = filters.top_p * total
    edge = (mass < cut[:, None]).sum(-1).clamp_(max=width - 1)
    kept = torch.where(has_top_p, mass.gather(-1, edge[:, None]).squeeze(-1), total)
    is_known &= is_closed | ~has_top_p | (mass[:, -1] >= cut)

    index = (mass <= (filters.uniform * kept)[:, None]).sum(-1)
    is_settled = is_known & (is_closed | (index < width))
    last = (leading > 0.0).sum(-1) - 1  # rounding may carry the product one token too far
    last = torch.where(has_top_p, torch.minimum(last, edge), last)
    index = torch.minimum(index, last).clamp_min_(0)  # a row of NaN has no last: any will do
    return ids.gather(-1, index[:, None]).squeeze(-1), is_settled
