"""The optimiser: Muon for the matrices of the layers, AdamW for everything else.

In:  parameters with gradients, a factor on the learning rates.
Out: parameters and state changed in place.
Maths: Muon (Jordan et al. 2024): momentum of the gradient, made orthogonal by five Newton–Schulz
steps, times sqrt(max(1, rows / columns)). Matrices of one shape are stacked and turned together;
each expert is a matrix. Embedding, head, norms, router and indexer take AdamW; the indexer has its
own loss and its own rate.
Decay matters: every Muon step has full size, so without decay singular values grow as long as one
trains. At 12,000 steps they stood at 10 to 20, attention weights at exactly 0 and 1, and recall had
stopped at 75 %. Decay is in proportion to the step: singular values stay below 1 / decay.
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
    indexer: float = 2e-3
    momentum: float = 0.95
    decay: float = 0.3  # of matrices
    other_decay: float = 0.1  # of what else has two dimensions
    betas: tuple[float, float] = (0.9, 0.95)


def is_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon turns it."""
    return value.dim() > 1 and not any(
        part in name for part in ("embed.", "lm_head.", "router.", "indexer.")
    )


class Optimiser:
    """State by parameter name, so that it can be saved and loaded beside the parameters.

    `begin(factor)` before each step puts its learning rates where `update` reads them: in memory,
    so that an update that was captured in a CUDA graph follows the schedule.
    """

    def __init__(self, params: Parameters, rates: Rates) -> None:
        self.rates, self.num_steps = rates, 0
        self._stacks: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self._others: list[list[str]] = [[], []]  # without and with the indexers' rate
        self.state: dict[str, Tensor] = {}
        for name, value in params.items():
            if not value.requires_grad:
                continue
            if is_matrix(name, value):
                self._stacks[tuple(value.shape)].append(name)
                self.state[f"momentum {name}"] = torch.zeros_like(value)
            else:
                self._others[".indexer." in name].append(name)
                for moment in ("first", "second"):
                    self.state[f"{moment} {name}"] = torch.zeros_like(value)
        device = next(iter(params.values())).device
        # negative rates of matrices, others, indexers; then of the last two without correction
        self._now = torch.zeros(5, device=device)

    def begin(self, factor: float) -> None:
        """Set the rates of the next update."""
        self.num_steps += 1
        low, high = self.rates.betas
        corrected = (1 - high**self.num_steps) ** 0.5 / (1 - low**self.num_steps) * factor
        other, indexer = self.rates.other, self.rates.indexer
        now = [-self.rates.matrix * factor, -other * corrected, -indexer * corrected]
        now += [-other * factor, -indexer * factor]
        self._now.copy_(torch.tensor(now), non_blocking=True)

    @torch.no_grad()
    def update(self, params: Parameters) -> None:
        """One update; gradients are let go. A parameter without a gradient stays."""
        for size, names in self._stacks.items():
            self._turn(params, [n for n in names if params[n].grad is not None], size)
        for kind, names in enumerate(self._others):
            rates = self._now[1 + kind], self._now[3 + kind]
            self._adam(params, [n for n in names if params[n].grad is not None], rates)
        for value in params.values():
            value.grad = None

    def _turn(self, params: Parameters, names: list[str], size: tuple[int, ...]) -> None:
        if not names:
            return
        values = [params[name] for name in names]
        grads = [value.grad for value in values]
        momenta = [self.state[f"momentum {name}"] for name in names]
        torch._foreach_lerp_(momenta, grads, 1 - self.rates.momentum)
        looked_ahead = torch._foreach_lerp(grads, momenta, self.rates.momentum)
        turned = orthogonal(torch.stack(looked_ahead).flatten(0, -3))
        rate = self._now[0] * max(1.0, size[-2] / size[-1]) ** 0.5
        turned = turned * rate
        torch._foreach_mul_(values, 1 + rate * self.rates.decay)
        torch._foreach_add_(values, list(turned.view(-1, *size).unbind(0)))

    def _adam(self, params: Parameters, names: list[str], rates: tuple[Tensor, Tensor]) -> None:
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
        torch._foreach_add_(spread, 1e-8)
        change = torch._foreach_div(first, spread)
        torch._foreach_mul_(change, rates[0])
        decaying = [value for value in values if value.dim() > 1]
        torch._foreach_mul_(decaying, 1 + rates[1] * self.rates.other_decay)
        torch._foreach_add_(values, change)


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
