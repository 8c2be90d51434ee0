"""FlashMLA: sparse MLA over bf16 latents (prefill kernel) and over fp8_ds_mla_656 (decode kernel).

In:  what sparse_mla takes (spec/attention.py). Out: (out, lse) as there.
Contract of the library: kernels.md §1.1 and §1.2. Heads are 64 or 128 and lists whole blocks, so
operands pass through padding.py: 16 heads cost what 64 do. The fp8 kernel has no list lengths: a
short row costs what a full one does. Where it pays, prefill unpacks the step's context first
(ops/workspace.py) and comes here with a plain pool. Scales of a cache entry are read in bf16: exact
for powers of two, which is what our layout writes.
Found as `flash_mla`, as vLLM's `_flashmla_C.abi3.so`, or in --provider-path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dispatch import Requirement, Sizes
from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops.attend import SparseMlaKernel
from gnomon.attention.providers.external.padding import empty_is_minus, no_rows, pad_operands
from gnomon.attention.providers.external.places import Places, missing
from gnomon.attention.providers.external.provider import EXTERNAL_RANK, ExternalProvider, Kernel

NAME = "flashmla"
VALUE_DIM = 512
PREFILL_BLOCK = 128  # keys: two blocks of 64 an iteration
DECODE_BLOCK = 64
ROWS_AT_ONCE = 2048  # of packed latents: query, partial results and lists of so many are set aside
MOST_DECODE_ROWS = 256  # rows up to here are requests of their own, split over SMs by a schedule
MOST_SCHEDULES = 64
URL = "https://github.com/deepseek-ai/FlashMLA"
FILE, PACKAGE = "_flashmla_C.abi3.so", "flash_mla"
OPERATORS = {"sparse_prefill_fwd": 8, "sparse_decode_fwd": 13}
"""Of vLLM's build, and how many arguments each is called with."""
FUNCTIONS = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")

REQUIREMENTS = {
    "sparse_mla": Requirement(
        devices=frozenset({"cuda"}),
        capabilities=frozenset({9, 10}),
        dtypes=frozenset({torch.bfloat16}),
        layouts=frozenset({"bf16_576", "fp8_ds_mla_656"}),
        sizes=(
            Sizes(("kv_lora_rank", "qk_rope_head_dim"), frozenset({(512, 64)})),
            Sizes.of("num_heads", range(1, 129)),
        ),
        can_capture=True,
    )
}

Schedule = tuple[Tensor, Tensor] | Any
"""What the decode kernel makes at its first call and takes back: opaque."""


@dataclass(frozen=True, slots=True)
class FlashMlaLibrary:
    """The two entries of the library, whatever it was found as.

    prefill(q [T, H, 576], kv [S, 1, 576], lists [T, 1, W], scale, lengths [T])
    -> (out [T, H, 512], lse [T, H]).
    decode(q [B, T, H, 576], kv [pages, P, 1, 656], lists [B, T, W], scale, schedule or None)
    -> (out [B, T, H, 512], lse [B, H, T], schedule).
    """

    prefill: Callable[[Tensor, Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]
    decode: Callable[
        [Tensor, Tensor, Tensor, float, Schedule | None], tuple[Tensor, Tensor, Schedule]
    ]


class FlashMla:
    """Calls the library; keeps the decode kernel's schedules, which depend on shapes alone.

    A captured graph reads a schedule at its address: those are kept for good, one for each captured
    size; of the others the latest MOST_SCHEDULES.
    """

    def __init__(self, library: FlashMlaLibrary) -> None:
        self._library = library
        self._schedules: OrderedDict[tuple[Any, ...], Schedule] = OrderedDict()
        self._captured: dict[tuple[Any, ...], Schedule] = {}

    def kernels(self) -> Mapping[str, Kernel]:
        """By operator."""
        return {"sparse_mla": SparseMlaKernel(self.sparse_mla, self.values)}

    def sparse_mla(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        pool: PagedPool,
        slots: Tensor,
        count: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Row r attends the first count[r] of its slots [R, W] (−1 behind)."""
        if q_latent.shape[0] == 0:
            return no_rows(q_latent)
        out, lse = self._attended(q_latent, q_rope, pool, (slots, count), scale)
        return out, empty_is_minus(lse)

    def values(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        pool: PagedPool,
        slots: Tensor,
        count: Tensor,
        scale: float,
    ) -> Tensor:
        """The first of sparse_mla's results: a launch less."""
        if q_latent.shape[0] == 0:
            return no_rows(q_latent)[0]
        return self._attended(q_latent, q_rope, pool, (slots, count), scale)[0]

    def _attended(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        pool: PagedPool,
        listed: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """(out [R, H, 512], lse [R, H] in the library's convention); ``listed``: slots, count."""
        if len(q_latent) > ROWS_AT_ONCE and not isinstance(pool.layout, PlainLayout):
            return self._in_pieces(q_latent, q_rope, pool, listed, scale)
        num_heads, is_plain = q_latent.shape[1], isinstance(pool.layout, PlainLayout)
        block = PREFILL_BLOCK if is_plain else DECODE_BLOCK
        query, lists = pad_operands(q_latent, q_rope, listed[0], block)
        if is_plain:
            entries = pool.typed()[:, None]
            out, lse = self._library.prefill(query, entries, lists[:, None], scale, listed[1])
        else:
            out, lse = self._packed(query, pool, lists, scale)
        return out[:, :num_heads], lse[:, :num_heads]

    def _in_pieces(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        pool: PagedPool,
        listed: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The same, so many rows after another: the kernel keeps fp32 results of all its rows."""
        out, lse = (
            torch.empty_like(q_latent),
            q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32),
        )
        for first in range(0, len(q_latent), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            rows = listed[0][part], listed[1][part]
            found = self._attended(q_latent[part], q_rope[part], pool, rows, scale)
            out[part], lse[part] = found
        return out, lse

    def _packed(
        self, query: Tensor, pool: PagedPool, lists: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out [R, H, 512], lse [R, H]) over pages of 656-byte entries."""
        pages = pool.planes[0][:, :, None]
        num_rows = query.shape[0]
        if num_rows > MOST_DECODE_ROWS:  # one request of many rows: nothing to split
            out, lse, _ = self._library.decode(query[None], pages, lists[None], scale, None)
            return out[0], lse[0].T
        key = (num_rows, query.shape[1], lists.shape[1], query.device)
        held, is_capturing = self._held(key), _is_capturing(query)
        out, lse, made = self._library.decode(query[:, None], pages, lists[:, None], scale, held)
        if is_capturing:
            if held is not None:
                self._captured[key] = held
        elif held is None:
            self._schedules[key] = made
            if len(self._schedules) > MOST_SCHEDULES:
                self._schedules.popitem(last=False)
        return out[:, 0], lse[:, :, 0]

    def _held(self, key: tuple[Any, ...]) -> Schedule | None:
        """The schedule of a shape, if it is known.

        One made while a graph is captured is not: it holds its numbers only once that graph runs.
        """
        if key in self._captured:
            return self._captured[key]
        return self._schedules.get(key)


def flashmla_provider(places: Places) -> ExternalProvider:
    """The provider; the library is looked up when it is first asked for."""

    def load() -> Mapping[str, Kernel]:
        return FlashMla(find(places)).kernels()

    return ExternalProvider(NAME, EXTERNAL_RANK, REQUIREMENTS, load)


def find(places: Places) -> FlashMlaLibrary:
    """The library; UnsupportedError if it is nowhere, cannot be loaded or lacks an entry."""
    operators = places.operators(FILE, "_flashmla_C", OPERATORS)
    if operators is not None:
        return library_of_operators(operators)
    module = places.module(PACKAGE, FUNCTIONS)
    if module is not None:
        return library_of_module(module)
    raise missing(PACKAGE, URL, FILE)


def library_of_operators(operators: Any) -> FlashMlaLibrary:
    """The build of vLLM: operators with positional arguments only."""

    def prefill(
        query: Tensor, entries: Tensor, lists: Tensor, scale: float, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, _, lse = operators.sparse_prefill_fwd(
            query, entries, lists, scale, VALUE_DIM, None, count, None
        )
        return out, lse

    def decode(
        query: Tensor, pages: Tensor, lists: Tensor, scale: float, schedule: Schedule | None
    ) -> tuple[Tensor, Tensor, Schedule]:
        plan, splits = (None, None) if schedule is None else schedule
        out, lse, plan, splits = operators.sparse_decode_fwd(
            query, pages, lists, None, None, plan, splits, None, None, None, VALUE_DIM, scale, None
        )
        return out, lse, (plan, splits)

    return FlashMlaLibrary(prefill, decode)


def library_of_module(module: Any) -> FlashMlaLibrary:
    """The package `flash_mla`."""

    def prefill(
        query: Tensor, entries: Tensor, lists: Tensor, scale: float, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, _, lse = module.flash_mla_sparse_fwd(
            query, entries, lists, scale, d_v=VALUE_DIM, topk_length=count
        )
        return out, lse

    def decode(
        query: Tensor, pages: Tensor, lists: Tensor, scale: float, schedule: Schedule | None
    ) -> tuple[Tensor, Tensor, Schedule]:
        plan = module.get_mla_metadata()[0] if schedule is None else schedule
        out, lse = module.flash_mla_with_kvcache(
            query,
            pages,
            None,
            None,
            VALUE_DIM,
            plan,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=lists,
        )
        return out, lse, plan

    return FlashMlaLibrary(prefill, decode)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
