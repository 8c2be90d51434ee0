"""Prompts to verify with: lengths that cross the seams, random token ids.

In:  how many, the vocabulary, index_topk, the page size, the longest length, a seed.
Out: prompts (tuples of ids), the same for the same arguments.
Seams first: around index_topk (where selection begins to matter), its multiples, page edges, one
token, the longest. Further lengths alternate between uniform and log-uniform, so that short and
long ones both occur often.
Not here: text.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptRule:
    """What the prompts of one model have in common."""

    vocab_size: int
    index_topk: int
    page_size: int
    longest: int


def draw_prompts(rule: PromptRule, count: int, seed: int, purpose: str) -> list[Prompt]:
    """`count` prompts; `purpose` separates the draws of different laws under one seed."""
    rng = random.Random(f"{seed}:{purpose}")
    return [draw_prompt(rule, length, rng) for length in draw_lengths(rule, count, rng)]


def draw_prompt(rule: PromptRule, length: int, rng: random.Random) -> Prompt:
    """Ids drawn evenly from the whole vocabulary."""
    return tuple(rng.randrange(rule.vocab_size) for _ in range(length))


def draw_lengths(rule: PromptRule, count: int, rng: random.Random) -> list[int]:
    """The seams, as many as there is room for, then random lengths; each at least 1."""
    k, page, longest = rule.index_topk, rule.page_size, rule.longest
    wished = (
        k + 1, 8 * k, 1, k, 4 * page + 1, 2 * k, k - 1, longest, 2, page, page + 1, 3 * k // 2,
        page - 1, k // 2, 4 * page, k + 2, 4 * page - 1, 3, 8 * k + 1, 16 * k,
    )  # fmt: skip
    lengths = [length for length in dict.fromkeys(wished) if 1 <= length <= longest][:count]
    while len(lengths) < count:
        if len(lengths) % 2:
            lengths.append(rng.randint(1, longest))
        else:
            lengths.append(round(math.exp(rng.uniform(0.0, math.log(longest)))))
    return lengths
