"""The router's choice in one launch: sigmoid, bias, best groups, best experts, weights, margin.

In:  logits [R, E] fp32, bias [E] fp32, request [R] int32 (negative in padding rows) or None, rule.
Out: as ops/routing.py's route, ties to the lower expert; ids of a row in falling order of choice.
`route_logits`: the same of logits whose K was cut in parts, which it adds, first to last.
A NaN is taken last, never twice, and makes the row's weights NaN. One program per row, so a row's
bits depend on that row alone. Maths: oracle_math.md §1.7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnomon.attention.ops.routing import RouterRule, Routing
from gnomon.attention.providers.triton.language import UNFUSED, padded

# Below every score: a NaN is better than an expert of a banned group, that than one taken before.
NAN = tl.constexpr(-1e37)
BANNED = tl.constexpr(-2e37)
TAKEN = tl.constexpr(-3e37)


@triton.jit
def gap(last, following):
    """How far the next one is from the last that is taken; +inf if it is no number."""
    return tl.where((last > NAN) & (following > NAN), last - following, float("inf"))


@triton.jit(do_not_specialize_on_alignment=["request"])
def route_kernel(
    logits,
    bias,
    request,
    ids,
    weights,
    margins,
    stride,
    part_stride,
    scale,
    shared_expert,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    HAS_REQUEST: tl.constexpr,
    WANT_MARGIN: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One row: GROUPS groups of WIDTH experts; logits [PARTS, rows, experts]."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_BLOCK)
    within = tl.arange(0, WIDTH_BLOCK)
    expert = group[:, None] * WIDTH + within[None, :]
    inside = (group < GROUPS)[:, None] & (within < WIDTH)[None, :]
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    here = logits + row * stride + expert
    logit = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        logit += tl.load(here + part * part_stride, mask=inside, other=0.0).to(tl.float32)
    score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score + tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, NAN)
    choice = tl.where(inside, choice, TAKEN)
    margin = float("inf")
    if TOP_GROUPS < GROUPS:
        best = tl.max(choice, 1)
        second = tl.max(
            tl.where(within[None, :] == tl.argmax(choice, 1)[:, None], TAKEN, choice), 1
        )
        group_score = tl.where(group < GROUPS, best + second, float("-inf"))
        is_kept = group < 0
        last = float("inf")
        for _ in tl.static_range(TOP_GROUPS):
            left = tl.where(is_kept, float("-inf"), group_score)
            last = tl.max(left, 0)
            is_kept = is_kept | (group == tl.argmax(left, 0))
        if WANT_MARGIN:
            following = tl.max(tl.where(is_kept, float("-inf"), group_score), 0)
            margin = tl.minimum(margin, gap(last, following))
        choice = tl.where(is_kept[:, None] | ~inside, choice, BANNED)
    flat = tl.reshape(choice, (GROUPS_BLOCK * WIDTH_BLOCK,))
    number = tl.reshape(expert, (GROUPS_BLOCK * WIDTH_BLOCK,))
    scores = tl.reshape(score, (GROUPS_BLOCK * WIDTH_BLOCK,))
    place = tl.arange(0, GROUPS_BLOCK * WIDTH_BLOCK)
    at = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.int64)
    weight = tl.zeros([K_BLOCK], tl.float32)
    last = float("inf")
    for k in tl.static_range(K):
        last = tl.max(flat, 0)
        is_it = place == tl.argmax(flat, 0)
        chosen = tl.where(at == k, tl.sum(tl.where(is_it, number, 0), 0).to(tl.int64), chosen)
        weight = tl.where(at == k, tl.sum(tl.where(is_it, scores, 0.0), 0), weight)
        flat = tl.where(is_it, TAKEN, flat)
    if WANT_MARGIN:
        if K < GROUPS * WIDTH:
            margin = tl.minimum(margin, gap(last, tl.max(flat, 0)))
        tl.store(margins + row, margin)
    if IS_NORMALISED:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    weight = weight * scale
    if PLACES > K:
        chosen = tl.where(at == K, shared_expert, chosen)
        weight = tl.where(at == K, 1.0, weight)
    if HAS_REQUEST:
        is_live = tl.load(request + row) >= 0
        chosen = tl.where(is_live, chosen, -1)
        weight = tl.where(is_live, weight, 0.0)
    tl.store(ids + row * PLACES + at, chosen, mask=at < PLACES)
    tl.store(weights + row * PLACES + at, weight, mask=at < PLACES)


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """``parts`` [P, R, E] fp32, whose sum the logits are.

    ``is_early``: the launch need not wait until they are there, as the kernel does.
    """

    parts: Tensor
    is_early: bool = False


def route_experts(
    logits: Tensor, bias: Tensor, request: Tensor | None, rule: RouterRule, want_margin: bool
) -> Routing:
    """As routing.route, in one launch."""
    return route_logits(Logits(logits[None]), bias, request, rule, want_margin)


def route_logits(
    logits: Logits, bias: Tensor, request: Tensor | None, rule: RouterRule, want_margin: bool
) -> Routing:
    """The same of logits in parts."""
    parts = logits.parts
    num_parts, num_rows, num_experts = parts.shape
    ids = torch.empty((num_rows, rule.width), dtype=torch.int64, device=parts.device)
    weights = torch.empty((num_rows, rule.width), dtype=torch.float32, device=parts.device)
    margin = weights.new_empty((num_rows,)) if want_margin else None
    width = num_experts // rule.num_groups
    if num_rows:
        route_kernel[(num_rows,)](
            parts, bias, ids if request is None else request, ids, weights,
            weights if margin is None else margin,
            parts.stride(1), parts.stride(0),
            float(rule.scale), -1 if rule.shared_expert is None else rule.shared_expert,
            rule.top_k, rule.width, rule.num_groups, width, rule.top_groups,
            padded(rule.num_groups), padded(width), padded(rule.width),
            rule.is_normalised, request is not None, want_margin,
            num_parts, logits.is_early,
            num_warps=1 if num_experts <= 256 else 2,
            **({"launch_pdl": True} if logits.is_early else {}),
            **UNFUSED,
        )  # fmt: skip
    return Routing(ids, weights, margin)


FUSIONS: dict[str, Callable[..., Any]] = {"route_experts": route_experts}
