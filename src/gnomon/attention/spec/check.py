"""check_provider: run one kernel on one case and compare it with the reference in float64.

In:  a spec, a provider that has the operator, a case, the compute dtype of the case.
Out: a SpecResult; nothing is raised for a wrong kernel, only for a call that cannot be made.
Both sides get their own copy of everything that can be written. NaN where the reference has none,
a wrong shape and a wrong infinity all count as an infinite difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dispatch import OpNeed, Provider
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.spec.model import (
    EXACT,
    Arguments,
    Case,
    OpSpec,
    Scale,
    SpecResult,
    Tolerance,
)


def check_provider(
    spec: OpSpec, provider: Provider, case: Case, dtype: torch.dtype = torch.float32
) -> SpecResult:
    """Compare ``provider``'s kernel with the spec's reference on ``case``."""
    given = _copies(case.arguments, widen=False)
    found = spec.observe(given, provider.kernel(spec.name)(*given))
    wide = _copies(case.arguments, widen=True)
    truth = spec.observe(wide, spec.reference(*wide))
    worst, share, where = 0.0, 0.0, "nowhere"
    for name, expected in truth.items():
        allowed = EXACT if name in spec.exact else spec.tolerances[dtype]
        difference, part, place = _compare(found.get(name), expected, allowed)
        if part > share or where == "nowhere":
            worst, share, where = difference, part, f"{name}{place}"
    extra = sorted(set(found) - set(truth))
    if extra:
        worst, share, where = math.inf, math.inf, f"{extra[0]} is not in the reference"
    return SpecResult(spec.name, provider.name, case.label, worst, share, where, share <= 1.0)


def check_all(
    specs: Mapping[str, OpSpec], provider: Provider, dtype: torch.dtype, seed: int
) -> list[SpecResult]:
    """Every case of every spec that the provider has a kernel for, at the default scale."""
    results = []
    for name, spec in specs.items():
        if not provider.supports(name, OpNeed(dtype=dtype)).is_ok:
            continue
        generator = torch.Generator().manual_seed(seed)
        for case in spec.cases(generator, dtype, Scale()):
            results.append(check_provider(spec, provider, case, dtype))
    return results


def _copies(arguments: Arguments, widen: bool) -> Arguments:
    return tuple(_copy(argument, widen) for argument in arguments)


def _copy(value: Any, widen: bool) -> Any:
    if isinstance(value, PagedPool):
        return _copy_pool(value, widen)
    if isinstance(value, Tensor):
        is_float = value.is_floating_point()
        return value.double() if widen and is_float else _same_view(value)
    return value


def _same_view(value: Tensor) -> Tensor:
    """A copy with the same strides and offset: clone() would make a slice contiguous."""
    length = value.untyped_storage().nbytes() // value.element_size()
    whole = value.as_strided((length,), (1,), 0).clone()
    return whole.as_strided(value.size(), value.stride(), value.storage_offset())


def _copy_pool(pool: PagedPool, widen: bool) -> PagedPool:
    """The same entries; a plain pool can be widened, so that the reference writes unrounded."""
    if not (widen and isinstance(pool.layout, PlainLayout)):
        return PagedPool(pool.layout, pool.storage.clone(), pool.page_size)
    wide = PlainLayout(torch.float64, pool.layout.dim).allocate(
        pool.num_pages, pool.page_size, pool.device
    )
    wide.typed_pages().copy_(pool.typed_pages())
    return wide


def _compare(
    found: Tensor | None, expected: Tensor, allowed: Tolerance
) -> tuple[float, float, str]:
    """(largest difference, its share of the allowance, its index) of one tensor."""
    if found is None:
        return math.inf, math.inf, " is missing"
    if found.shape != expected.shape:
        return math.inf, math.inf, f" has shape {list(found.shape)}, not {list(expected.shape)}"
    if expected.numel() == 0:
        return 0.0, 0.0, ""
    actual, truth = found.double(), expected.double()
    is_same = (actual == truth) | (actual.isnan() & truth.isnan())
    difference = (actual - truth).abs()
    # A wrong infinity or NaN has no finite difference; equal infinities have none at all.
    difference = difference.masked_fill(~difference.isfinite(), math.inf).masked_fill(is_same, 0.0)
    limit = allowed.absolute + allowed.relative * truth.abs().nan_to_num(0.0, 0.0, 0.0)
    share = torch.where(difference == 0, difference, difference / limit)
    at = int(share.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), share.shape)]
    return float(difference.flatten()[at]), float(share.flatten()[at]), str(index)
