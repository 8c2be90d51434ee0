"""Log-probabilities that a client may ask for, of the model's own distribution.

In:  raw float32 logits [M, V] of the model, before bias, penalties, temperature and filters, so
     that they say what the model thinks and not what the request allows (as vLLM's default).
Out: one TokenLogprobs per row: the chosen token's log-probability and 1-based rank, and the
     `num_top` most likely tokens, best first, equal ones by the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.engine.messages import TokenLogprobs
from gnomon.engine.sampling_order import leading_tokens, ranks


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """TokenLogprobs of token_ids [M] under logits [M, V], with num_top[m] alternatives each."""
    width = min(max(num_top), logits.shape[-1])
    log_mass = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = (logits.gather(-1, token_ids[:, None]) - log_mass).squeeze(-1).tolist()
    rank = ranks(logits, token_ids).tolist()
    if width:
        top_ids_tensor = leading_tokens(logits, width)
        top_values = (logits.gather(-1, top_ids_tensor) - log_mass).tolist()
        top_ids = top_ids_tensor.tolist()
    else:
        top_ids = top_values = [[]] * len(chosen)
    ids: list[int] = token_ids.tolist()
    return [
        TokenLogprobs(
            token_id=ids[row],
            logprob=chosen[row],
            rank=rank[row],
            top=list(zip(top_ids[row][:count], top_values[row][:count], strict=True)),
        )
        for row, count in enumerate(num_top)
    ]
