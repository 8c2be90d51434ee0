"""Operators = their specifications; cache layouts keep within their own bounds.

Operators: for each operator that this machine would use for the model, its provider's kernel runs
the cases of the OpSpec, at the spec's own small sizes and at the model's, in float32 and bfloat16.
Layouts: every layout that fits the model's latents and index keys, and the packed FP8 layouts at
the published widths, over values of all magnitudes. What is written to a pool and gathered must be
what the bytes say, and what the bytes say must be within the format's bound of what was written.
Both report the worst share of what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gnomon.attention.dispatch import OpNeed, Provider
from gnomon.attention.layouts import IndexKeyDims, KVLayout, LatentDims
from gnomon.attention.layouts.registry import candidates
from gnomon.attention.providers.external.provider import ExternalProvider
from gnomon.attention.spec import SPECS, Scale, check_provider
from gnomon.verify.context import Context
from gnomon.verify.law import Law
from gnomon.verify.on_device import OnDevice
from gnomon.verify.result import Tally

UNIT = "of allowed"
DTYPES = (torch.float32, torch.bfloat16)
PUBLISHED = (LatentDims(512, 64), LatentDims(512, 0), IndexKeyDims(128))
MAGNITUDES = (0.0, 1e-30, 1e-8, 1e-4, 1e-2, 1.0, 30.0, 1e4)
NUM_ROWS = 48
PAGE = 4


def _operators(context: Context) -> Tally:
    tally = context.tally(UNIT)
    choices = context.survey().choices
    dims = context.config.attention_dims()
    scales = Scale(), replace(Scale(), dims=dims, page_size=context.block_size)
    outside: set[str] = set()
    for done, choice in enumerate(choices):
        provider = choice.provider
        if isinstance(provider, ExternalProvider):
            outside.add(provider.name)
            continue
        if context.device != "cpu":
            provider = OnDevice(provider, context.device)
        for dtype in DTYPES:
            if provider.supports(choice.op, OpNeed(device=context.device, dtype=dtype)).is_ok:
                for scale in scales:
                    _check(tally, choice.op, provider, dtype, scale, context.settings.seed)
        context.step(done, len(choices))
    names = {choice.provider.name for choice in choices} - outside
    tally.note("providers: " + ", ".join(sorted(names)))
    if outside:
        named = ", ".join(sorted(outside))
        tally.note(f"{named}: built for sizes of their own; the laws of the engine run them")
    return tally


def _check(
    tally: Tally, op: str, provider: Provider, dtype: torch.dtype, scale: Scale, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for case in SPECS[op].cases(generator, dtype, scale):
        found = check_provider(SPECS[op], provider, case, dtype)
        failure = None
        if not found.is_ok:
            failure = (
                f"{op} of provider {provider.name}, {dtype}, case {found.case!r}: off by "
                f"{found.worst:.3g}, {found.share:.3g} times what is allowed, at {found.where}"
            )
        tally.add(found.share, failure=failure)


def _layouts(context: Context) -> Tally:
    tally = context.tally(UNIT)
    generator = torch.Generator().manual_seed(context.settings.seed)
    layouts = list(_all_layouts(context))
    for done, layout in enumerate(layouts):
        for magnitude in MAGNITUDES:
            values = torch.randn(NUM_ROWS, layout.dim, generator=generator) * magnitude
            _check_layout(tally, layout, values, magnitude)
        context.step(done, len(layouts))
    tally.note(", ".join(layout.id for layout in layouts))
    return tally


def _all_layouts(context: Context) -> Iterator[KVLayout]:
    config = context.config
    own = (
        LatentDims(config.kv_lora_rank, config.qk_rope_head_dim),
        IndexKeyDims(config.index_head_dim),
    )
    seen: set[str] = set()
    for dims in (*own, *PUBLISHED):
        for layout in candidates(dims, torch.float64):
            if layout.id not in seen:
                seen.add(layout.id)
                yield layout


def _check_layout(tally: Tally, layout: KVLayout, values: Tensor, magnitude: float) -> None:
    """One case: a round trip through bytes, and through a pool at scattered slots."""
    decoded = layout.dequantise(layout.quantise(values)).double()
    bound = layout.round_trip_bound(values)
    off = (decoded - values.double()).abs()
    share = torch.where(off == 0, off, off / bound).nan_to_num(nan=torch.inf)
    where = f"layout {layout.id}, values of about {magnitude:g}"
    failure = None
    if float(share.max()) > 1.0:
        failure = f"{where}: off by {float(share.max()):.3g} times the bound"
    pool = layout.allocate(1 + NUM_ROWS // 2, PAGE)
    slots = torch.arange(NUM_ROWS) * 2 + PAGE
    slots[0] = -1  # writes nothing
    layout.write(pool, slots, values)
    gathered = layout.gather(pool, slots).double()
    if not torch.equal(gathered[1:], decoded[1:]) or bool(gathered[0].any()):
        failure = f"{where}: what a pool gives back is not what the bytes say"
    tally.add(float(share.max()), failure=failure)


LAWS = (
    Law("operators", "every operator's kernel = its specification", _operators),
    Law("layouts", "quantised and read back: within the layout's bound", _layouts),
)
