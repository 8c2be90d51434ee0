"""The optimiser: Muon for the matrices of the layers, AdamW for everything else.

In:  parameters with gradients, a factor on the learning rates.
Out: parameters and state changed in place.
Maths: Muon (Jordan et al. 2024): momentum of the gradient, made orthogonal by five Newton–Schulz
steps, times sqrt(max(1, rows / columns)). Matrices of one shape are stacked and turned together;
each expert is a matrix. Embedding, head, norms, router and indexer take AdamW; the indexer has its
own loss and its own rate.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from training.parameters import Parameters

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates at factor 1."""

    matrix: float = 0.02
    other: float = 3e-3
    indexer: float = 3e-3
    momentum: float = 0.95
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)


def is_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon turns it."""
    return value.dim() > 1 and not any(
        part in name for part in ("embed.", "lm_head.", "router.", "indexer.")
    )


class Optimiser:
    """State by parameter name, so that it can be saved and loaded beside the parameters."""

    def __init__(self, params: Parameters, rates: Rates) -> None:
        self.rates, self.num_steps = rates, 0
        self._stacks: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self._others: dict[float, list[str]] = defaultdict(list)
        self.state: dict[str, Tensor] = {}
        for name, value in params.items():
            if not value.requires_grad:
                continue
            if is_matrix(name, value):
                self._stacks[tuple(value.shape)].append(name)
                self.state[f"momentum {name}"] = torch.zeros_like(value)
            else:
                rate = rates.indexer if ".indexer." in name else rates.other
                self._others[rate].append(name)
                for moment in ("first", "second"):
                    self.state[f"{moment} {name}"] = torch.zeros_like(value)

    @torch.no_grad()
    def step(self, params: Parameters, factor: float) -> None:
        """One update; gradients are cleared. A parameter without a gradient stays."""
        self.num_steps += 1
        for size, names in self._stacks.items():
            self._turn(params, [n for n in names if params[n].grad is not None], size, factor)
        for rate, names in self._others.items():
            self._adam(params, [n for n in names if params[n].grad is not None], rate * factor)
        for value in params.values():
            value.grad = None

    def _turn(
        self, params: Parameters, names: list[str], size: tuple[int, ...], factor: float
    ) -> None:
        if not names:
            return
        values = [params[name] for name in names]
        grads = [value.grad for value in values]
        momenta = [self.state[f"momentum {name}"] for name in names]
        torch._foreach_lerp_(momenta, grads, 1 - self.rates.momentum)
        looked_ahead = torch._foreach_lerp(grads, momenta, self.rates.momentum)
        turned = orthogonal(torch.stack(looked_ahead).flatten(0, -3))
        rate = self.rates.matrix * factor
        scale = max(1.0, size[-2] / size[-1]) ** 0.5
        torch._foreach_mul_(values, 1 - rate * self.rates.decay)
        torch._foreach_add_(values, list(turned.view(-1, *size).unbind(0)), alpha=-rate * scale)

    def _adam(self, params: Parameters, names: list[str], rate: float) -> None:
        if not names:
            return
        values = [params[name] for name in names]
        grads = [value.grad for value in values]
        first = [self.state[f"first {name}"] for name in names]
        second = [self.state[f"second {name}"] for name in names]
        low, high = self.rates.betas
        torch._foreach_lerp_(first, grads, 1 - low)
        torch._foreach_mul_(second, high)
        torch._foreach_addcmul_(second, grads, grads, 1 - high)
        spread = torch._foreach_sqrt(second)
        torch._foreach_div_(spread, (1 - high**self.num_steps) ** 0.5)
        torch._foreach_add_(spread, 1e-8)
        torch._foreach_addcdiv_(values, first, spread, -rate / (1 - low**self.num_steps))


def orthogonal(stack: Tensor) -> Tensor:
    """Each matrix of [n, rows, columns] with its singular values brought near 1; float32."""
    x = stack.bfloat16() if stack.is_cuda else stack
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.transpose(-2, -1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.transpose(-2, -1) if is_tall else x).float()
