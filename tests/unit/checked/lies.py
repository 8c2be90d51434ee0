"""Kernels that lie: torch's with one stated thing wrong, and the table of what each one breaks.

In:  nothing. Out: LIES. A Lie says by which operator its kernel is called, which rule it breaks, in
which row of the bench (steps.py) and, where that is a row of a request, of which request.
``levels``: where poisoned rows, poisoned scratch or guarded arguments are needed, FULL alone finds
it. Not here: the tests (tests/laws/test_lying_providers.py, tests/unit/checked).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gnomon.attention.checked import CheckLevel
from gnomon.attention.checks.faults import Rule
from tests.unit.checked.steps import NUM_ROWS, TORCH

BOTH = (CheckLevel.SAMPLED, CheckLevel.FULL)
FULL = (CheckLevel.FULL,)
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Lie:
    """``kernel`` in the place of ``kernel_of``: a call of ``op`` breaks ``rule`` at ``row``."""

    op: str
    kernel_of: str
    kernel: Callable[..., Any]
    rule: Rule
    row: int | None
    request: str | None
    levels: tuple[CheckLevel, ...] = BOTH
    says: str = ""

    def __str__(self) -> str:
        return self.kernel.__name__


def swapped_ids(*arguments: Any) -> Any:
    """Ids of a row in descending order."""
    right = TORCH["topk"](*arguments)
    if len(right.ids) <= 4:
        return right
    ids = right.ids.clone()
    ids[4] = ids[4].flip(0)
    return replace(right, ids=ids)


def repeated_id(*arguments: Any) -> Any:
    """A row names its first key twice."""
    right = TORCH["topk"](*arguments)
    ids = right.ids.clone()
    if len(ids) > 4:
        ids[4, 1] = ids[4, 0]
    return replace(right, ids=ids)


def one_less(*arguments: Any) -> Any:
    """A row's list lacks its last key; ids and count agree with each other."""
    right = TORCH["topk"](*arguments)
    ids, count = right.ids.clone(), right.count.clone()
    if len(ids) > 4:
        count[4] -= 1
        ids[4, int(count[4])] = -1
    return replace(right, ids=ids, count=count)


def one_more(*arguments: Any) -> Any:
    """A row's count is one above its ids."""
    right = TORCH["topk"](*arguments)
    return replace(right, count=right.count + (torch.arange(len(right.count)) == 4).int())


def too_far(*arguments: Any) -> Any:
    """A row attends the key after its last one."""
    right = TORCH["topk"](*arguments)
    ids = right.ids.clone()
    if len(ids) > 4:
        ids[4, -1] = arguments[1][4]
    return replace(right, ids=ids)


def second_best(*arguments: Any) -> Any:
    """All rows choose the best keys but the very best one."""
    scores, count, k, want_margin = arguments
    worse = scores.masked_fill(scores == scores.amax(1, keepdim=True), -1e30)
    worse = worse.masked_fill(torch.arange(scores.shape[1]) >= count[:, None], -torch.inf)
    return TORCH["topk"](worse, count, k, want_margin)


def binary_lse(*arguments: Any) -> Any:
    """The log to base 2, as some kernels give it."""
    out, lse = TORCH["sparse_mla"](*arguments)
    return out, lse / LN2


def binary_dense_lse(*arguments: Any) -> Any:
    """The same on the dense route."""
    out, lse = TORCH["dense_mha"](*arguments)
    return out, lse / LN2


def unscaled(*arguments: Any) -> Any:
    """Another softmax scale than was asked for."""
    return TORCH["sparse_mla"](*arguments[:-1], arguments[-1] * 1.01)


def extra_row(*arguments: Any) -> Any:
    """A row too many, as of the padded batch."""
    out, lse = TORCH["sparse_mla"](*arguments)
    return torch.cat((out, out[-1:])), torch.cat((lse, lse[-1:]))


def past_its_rows(*arguments: Any, out: Any = None) -> Any:
    """Writes into memory behind the rows that it was given."""
    right = TORCH["sparse_mla"](*arguments)
    for place, value in zip(out, right, strict=True):
        place[:] = value
    shape = (NUM_ROWS + 1, *out[0].shape[1:])
    out[0].as_strided(shape, out[0].stride(), out[0].storage_offset())[NUM_ROWS] = 1.0
    return out


def row_left_out(*arguments: Any, out: Any = None) -> Any:
    """Leaves a row of out= as it was."""
    right = TORCH["sparse_mla"](*arguments)
    for place, value in zip(out, right, strict=True):
        place[:5], place[6:] = value[:5], value[6:]
    return out


def row_of_empty_memory(*arguments: Any) -> Any:
    """Leaves a row of memory of its own as torch.empty gave it."""
    right, lse = TORCH["sparse_mla"](*arguments)
    out = torch.empty_like(right)
    out[:5], out[6:] = right[:5], right[6:]
    return out, lse


def padding_not_zero(*arguments: Any) -> Any:
    """Softmax over no key at all, as uniform weights."""
    out, lse = TORCH["sparse_mla"](*arguments)
    return out.masked_fill((arguments[4] == 0)[:, None, None], 0.5), lse


def leaking_norm(x: Any, weight: Any, eps: float) -> Any:
    """A reduction over all rows instead of one."""
    return TORCH["rms_norm"](x, weight, eps) + 0 * x.sum(0)


def leaking_attention(*arguments: Any) -> Any:
    """A mask by multiplication: 0 · NaN is NaN."""
    out, lse = TORCH["sparse_mla"](*arguments)
    return out + 0 * arguments[0].sum((0, 1)), lse


def leaking_experts(*arguments: Any) -> Any:
    """Rows without experts are multiplied by 0 instead of left out."""
    return TORCH["moe"](*arguments) + 0 * arguments[0].sum(0)


def wrong_slot(*arguments: Any) -> Any:
    """A row's latent lands one page further on."""
    *rest, pool, slots = arguments
    moved = torch.where(torch.arange(len(slots)) == 3, (slots + 8) % pool.num_slots, slots)
    return TORCH["latent_write"](*rest, pool, moved)


def second_slot(*arguments: Any) -> Any:
    """A row's latent is written to its slot and once more beside it."""
    *_, pool, slots = arguments
    TORCH["latent_write"](*arguments)
    free = [s for s in (int(slots[3]) + 1, int(slots[3]) - 1) if s not in slots.tolist()]
    pool.typed()[free[0]] = pool.typed()[int(slots[3])]


def wrong_key_slot(*arguments: Any) -> Any:
    """A row's index key is not written, but another slot is."""
    *rest, pool, slots = arguments
    moved = torch.where(torch.arange(len(slots)) == 8, (slots + 8) % pool.num_slots, slots)
    return TORCH["index_prepare"](*rest, pool, moved)


def padding_written(*arguments: Any) -> Any:
    """Rows of slot −1 go to slot 0."""
    TORCH["latent_write"](*arguments)
    arguments[4].typed()[0] = 1.0


def norm_forgotten(kv: Any, weight: Any, eps: float, turns: Any, pool: Any, slots: Any) -> Any:
    """The latent is written without its norm."""
    return TORCH["latent_write"](
        kv * torch.tensor([1.0] * 39 + [1.5]), weight, eps, turns, pool, slots
    )


def argument_changed(x: Any, weight: Any, eps: float) -> Any:
    """Computes in place."""
    x[7] = TORCH["rms_norm"](x, weight, eps)[7]
    return TORCH["rms_norm"](x, weight, eps)


def no_flag(*arguments: Any) -> Any:
    """Hides NaN scores."""
    right = TORCH["topk"](*arguments)
    return replace(right, nan_rows=torch.zeros_like(right.nan_rows))


def nan_score(*arguments: Any) -> Any:
    """A NaN that nothing in the arguments explains."""
    scores = TORCH["index_scores"](*arguments)
    if scores.shape[0] > 4:
        scores[4, 2] = math.nan
    return scores


def visible_future(*arguments: Any) -> Any:
    """Scores behind a row's last visible key."""
    q, weights, keys, count, scale = arguments
    return TORCH["index_scores"](q, weights, keys, (count + 1).clamp_max(len(keys)), scale)


def half_precision(*arguments: Any) -> Any:
    """The right numbers in another dtype."""
    return TORCH["rms_norm"](*arguments).half()


def wrong_entry(*arguments: Any) -> Any:
    """Starts one entry too late."""
    return TORCH["context_gather"](*arguments).roll(-1, 0)


def forgotten_weight(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    """Joins two parts without their weights."""
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


LIES = [
    Lie("index_select", "topk", swapped_ids, Rule.ORDER, 8, "c"),
    Lie("index_select", "topk", repeated_id, Rule.ORDER, 8, "c"),
    Lie("index_select", "topk", one_less, Rule.COUNT, 8, "c"),
    Lie("index_select", "topk", one_more, Rule.COUNT, 8, "c"),
    Lie("index_select", "topk", too_far, Rule.RANGE, 8, "c"),
    Lie("index_select", "topk", second_best, Rule.BEST, None, None),
    Lie("index_select", "index_scores", nan_score, Rule.FINITE, 8, "c"),
    Lie("index_select", "index_scores", visible_future, Rule.SILENT, None, None),
    Lie("sparse_mla", "sparse_mla", binary_lse, Rule.LSE, None, None, says="base 2"),
    Lie("dense_mha", "dense_mha", binary_dense_lse, Rule.LSE, None, None, says="base 2"),
    Lie("sparse_mla", "sparse_mla", unscaled, Rule.LSE, None, None),
    Lie("sparse_mla", "sparse_mla", extra_row, Rule.SHAPE, NUM_ROWS, None),
    Lie("sparse_mla", "sparse_mla", past_its_rows, Rule.REDZONE, NUM_ROWS, None),
    Lie("sparse_mla", "sparse_mla", row_left_out, Rule.WRITTEN, 5, "c"),
    Lie("sparse_mla", "sparse_mla", row_of_empty_memory, Rule.FINITE, 5, "c", FULL, "not written"),
    Lie("sparse_mla", "sparse_mla", padding_not_zero, Rule.SILENT, 16, None),
    Lie("rms_norm", "rms_norm", leaking_norm, Rule.LEAK, 0, "a", FULL),
    Lie("sparse_mla", "sparse_mla", leaking_attention, Rule.LEAK, 0, "a", FULL),
    Lie("moe", "moe", leaking_experts, Rule.LEAK, 0, "a", FULL),
    Lie("latent_write", "latent_write", wrong_slot, Rule.SLOT_WRITTEN, 3, "b"),
    Lie("latent_write", "latent_write", second_slot, Rule.STRAY, 3, "b"),
    Lie("index_prepare", "index_prepare", wrong_key_slot, Rule.SLOT_WRITTEN, 8, "c"),
    Lie("latent_write", "latent_write", padding_written, Rule.STRAY, None, None),
    Lie("latent_write", "latent_write", norm_forgotten, Rule.VALUE, None, None),
    Lie("rms_norm", "rms_norm", argument_changed, Rule.READ_ONLY, 7, "c", FULL),
    Lie("rms_norm", "rms_norm", half_precision, Rule.SHAPE, None, None),
    Lie("context_gather", "context_gather", wrong_entry, Rule.VALUE, None, "c"),
    Lie("lse_merge", "lse_merge", forgotten_weight, Rule.VALUE, None, None),
]
