"""Small traces made by hand, to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gnomon.verify.trace import Trace

NUM_ROWS = 6
VOCAB = 5
K = 3


def keys_of(lists: Sequence[Sequence[int]]) -> torch.Tensor:
    """Key lists, −1 padded to K."""
    return torch.tensor([[*row, *[-1] * (K - len(row))] for row in lists], dtype=torch.int32)


def plain_trace(num_prompt: int = 3) -> Trace:
    """Six rows, two layers with key lists, one with experts; token p + 1 is the best of row p."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(NUM_ROWS, VOCAB, generator=generator)
    chosen = [(place * 2 + 1) % VOCAB for place in range(NUM_ROWS)]
    for row, token in enumerate(chosen):
        logits[row, token] = 2.0 + row
    lists = [list(range(row + 1)) if row < K else [0, row - 1, row] for row in range(NUM_ROWS)]
    margin = torch.full((NUM_ROWS,), torch.inf, dtype=torch.float64)
    margin[K:] = 0.5
    return Trace(
        name="t",
        num_prompt=num_prompt,
        tokens=(4, *chosen),
        logits=logits,
        is_computed=torch.ones(NUM_ROWS, dtype=torch.bool),
        keys={0: keys_of(lists), 2: keys_of(lists)},
        experts={1: torch.tensor([[0, 3]] * NUM_ROWS)},
        key_margin={0: margin.clone(), 2: margin.clone()},
        expert_margin={1: torch.full((NUM_ROWS,), 0.25, dtype=torch.float64)},
    )


def with_keys(trace: Trace, layer: int, row: int, keys: Sequence[int]) -> Trace:
    changed = trace.keys[layer].clone()
    changed[row] = torch.tensor([*keys, *[-1] * (K - len(keys))])
    return replace(trace, keys={**trace.keys, layer: changed})


def with_experts(trace: Trace, row: int, experts: Sequence[int]) -> Trace:
    changed = trace.experts[1].clone()
    changed[row] = torch.tensor(list(experts))
    return replace(trace, experts={1: changed})


def with_key_margin(trace: Trace, layer: int, row: int, margin: float) -> Trace:
    changed = trace.key_margin[layer].clone()
    changed[row] = margin
    return replace(trace, key_margin={**trace.key_margin, layer: changed})


def with_logit(trace: Trace, row: int, token: int, change: float) -> Trace:
    logits = trace.logits.clone()
    logits[row, token] += change
    return replace(trace, logits=logits)
