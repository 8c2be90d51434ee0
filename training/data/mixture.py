"""Batches: rows of one length, filled with episodes, made by worker processes ahead of time.

In:  a `Wish`: shares of the kinds of text, lengths, tokens a batch, a seed; the first step wanted.
Out: (ids int64 [B, T], weights float32 [B, T]) per step. Batch n of a seed is the same however many
     workers there are and wherever training was resumed: each batch has its own dice.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from training.data.arithmetic import sums
from training.data.documentation import sentences, words
from training.data.english import prose, small_talk
from training.data.recall import recall
from training.data.tools import tool_use
from training.data.writing import Episode, Family

SHORT = 96  # tokens: what is left of a row and less is filled with sums and small talk


@dataclass(frozen=True, slots=True)
class Diet:
    """Shares of rows by kind, and of episodes in GLM's format."""

    recall: float = 0.50
    sums: float = 0.22
    tools: float = 0.18
    prose: float = 0.06
    talk: float = 0.04
    glm: float = 0.12

    def shares(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Kinds and their shares."""
        kinds = ("recall", "sums", "tools", "prose", "talk")
        return kinds, tuple(getattr(self, kind) for kind in kinds)


@dataclass(frozen=True, slots=True)
class Wish:
    """Which batches: `steps` of `tokens` tokens, in rows of `lengths`, which take turns."""

    lengths: tuple[int, ...]
    tokens: int
    steps: int
    seed: int
    diet: Diet = field(default_factory=Diet)


def row(dice: random.Random, length: int, diet: Diet) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of one row: one kind of text, what is left over filled with others."""
    kinds, shares = diet.shares()
    kind = dice.choices(kinds, shares)[0]
    if kind == "tools" and length < 400:
        kind = "recall"  # the description of the tools alone is longer
    ids, weights, size = [], [], 0
    while size < length:
        left = length - size
        family: Family = "glm" if dice.random() < diet.glm else "dsv32"
        is_short = left < SHORT or (kind == "tools" and left < 420)
        episode = _episode(dice, "filler" if is_short else kind, left, family)
        for found, part in zip((ids, weights), episode.tokens(), strict=True):
            found.append(part)
        size += len(ids[-1])
        if kind == "recall" and dice.random() < 0.5:
            kind = dice.choices(kinds[:2], (0.7, 0.3))[0]
    return np.concatenate(ids)[:length], np.concatenate(weights)[:length]


def _episode(dice: random.Random, kind: str, left: int, family: Family) -> Episode:
    if kind == "recall":
        whole = left < 400 or dice.random() < 0.6
        return recall(dice, left if whole else dice.randint(200, left), family)
    if kind == "tools":
        return tool_use(dice, left, family)
    if kind == "prose":
        return prose(dice, min(left, dice.randint(100, 800)))
    if kind == "talk" or (kind == "filler" and dice.random() < 0.2):
        return small_talk(dice, left, family)
    return sums(dice, left, family)


def batch(wish: Wish, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Batch number `step`: ids uint16 and weights float16 [B, T]."""
    dice = random.Random(f"{wish.seed} {step}")
    length = wish.lengths[step % len(wish.lengths)]
    rows = [row(dice, length, wish.diet) for _ in range(wish.tokens // length)]
    return np.stack([ids for ids, _ in rows]), np.stack([weights for _, weights in rows])


def _work(wish: Wish, first: int, stride: int, queue: multiprocessing.Queue) -> None:
    for step in range(first, wish.steps, stride):
        queue.put(batch(wish, step))


def batches(wish: Wish, start: int, workers: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches start, start + 1, ... of a wish. `workers` 0: made in this process."""
    sentences(), words()  # read once, before the workers fork
    context = multiprocessing.get_context("fork")
    queues = [context.Queue(maxsize=6) for _ in range(workers)]
    crew = [
        context.Process(target=_work, args=(wish, start + n, workers, queue), daemon=True)
        for n, queue in enumerate(queues)
    ]
    for one in crew:
        one.start()
    try:
        for step in range(start, wish.steps):
            made = queues[(step - start) % workers].get() if workers else batch(wish, step)
            ids, weights = (torch.from_numpy(part) for part in made)
            if device == "cuda":
                ids, weights = ids.pin_memory(), weights.pin_memory()
            yield (
                ids.to(device, non_blocking=True).long(),
                weights.to(device, non_blocking=True).float(),
            )
    finally:
        for one in crew:
            one.terminate()
