"""Cases D of reference/bugs.md: units and layouts: token, entry, page, packed page."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.geometry import PageTable, build_geometry
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.cache.schema import CacheSchema, GroupSpec, PartSpec
from gnomon.cache.tensors import CacheTensors
from tests.laws.bugs.op_cases import PROVIDERS, op_case, operators


def test_d1_slots_of_a_packed_group_are_a_bijection() -> None:
    """16 tokens a page in one group, 4 entries of 4 tokens in the other; prompt 40 in chunks."""
    packed_pages, token_pages = torch.tensor([[5, 2, 9]], dtype=torch.int32), [[7, 1, 4]]
    written: dict[str, list[int]] = {"tokens": [], "compressed": []}
    for start, stop in ((0, 16), (16, 32), (32, 40)):
        table = PageTable("compressed", packed_pages, page_size=4, tokens_per_entry=4)
        tables = {"tokens": token_pages, "compressed": table}
        geometry = build_geometry([stop - start], [stop], tables, page_size=16)
        geometry.check({"tokens": 8, "compressed": 10})
        for group, slots in written.items():
            slots += [slot for slot in geometry.writes[group].slots.tolist() if slot >= 0]
    # The report's divisor came from a kernel page of half the size: wrong columns, then none.
    naive = [e // 2 for e in range(10)]
    assert naive[:2] == [0, 0]
    assert naive[2:6] != [e // 4 for e in range(2, 6)]
    assert max(naive) >= packed_pages.shape[1]
    assert written["tokens"] == [[7, 1, 4][p // 16] * 16 + p % 16 for p in range(40)]
    assert written["compressed"] == [[5, 2, 9][e // 4] * 4 + e % 4 for e in range(10)]
    assert len(set(written["compressed"])) == 10


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("ratio", [1, 4])
def test_d2_a_table_of_two_columns_for_65_entries(ratio: int, provider: str) -> None:
    """Page 64, 65 entries, 2 columns; behind the table's row stands another request's page."""
    layout = PlainLayout(torch.float32, 8)
    pool = layout.allocate(6, 64)
    pool.typed().fill_(torch.nan)
    pool.typed()[64:192] = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    pages = torch.tensor([[2, 1], [5, 5]], dtype=torch.int32)
    table = PageTable("g", pages, 64, ratio)
    geometry = build_geometry([1, 1], [65 * ratio, 65 * ratio], {"g": table})
    entries = torch.arange(66)
    slots = table.entry_slots(geometry.rows.request[:1, None], entries[None])[0]
    assert slots[:65].tolist() == [*range(128, 192), 64]
    assert table.entry_slots(geometry.rows.request[:1], torch.tensor([128])).tolist() == [-1]
    q = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(1))
    count = table.num_entries(geometry.rows.kv_len[:1])
    assert count.tolist() == [65]
    scores = operators(provider).kernels["index_scores_paged"](
        q, torch.ones(1, 2), pool, pages[:1], count, 1.0
    )
    expected = (q[0] @ pool.typed()[slots[:65]].T).clamp_min(0).sum(0)
    assert torch.allclose(scores[0, :65], expected, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("extra", [0, 1, 7, 8])
def test_d3_a_page_stride_above_the_page(provider: str, extra: int) -> None:
    """Page strides padded by 1, 7 entries and by as much again; distinct entries everywhere."""
    layout = PlainLayout(torch.float64, 40)
    stride = (4 + extra) * layout.bytes_per_token
    plain = op_case([5, 1], [22, 17], page_stride_bytes=None)
    padded = op_case([5, 1], [22, 17], page_stride_bytes=stride)
    assert padded.pool.page_stride_bytes == stride
    ops = operators(provider)
    request = padded.geometry.rows.request
    slots = padded.geometry.tables["tokens"].slots(request[:, None], torch.arange(22)[None])
    count = padded.geometry.rows.kv_len
    slots = slots.masked_fill(torch.arange(22) >= count[:, None], -1)
    for case in (plain, padded):
        got = ops.kernels["sparse_mla"](
            case.q_latent.data, case.q_rope.data, case.pool, slots, count, 0.3
        )
        assert torch.allclose(got[0], case.expected(case.causal(), 0.3)[0], atol=1e-12)
        gathered = ops.context_gather(case.pool, case.geometry.tables["tokens"], 0, 3, 22)
        assert torch.equal(gathered, case.stored[0][3:])
    if extra:  # a reader that addresses entries by number, as if pages lay without a gap
        flat = padded.pool.storage.view(-1).view(torch.float64)[: 40 * 23 * 4].view(-1, 40)
        assert not torch.equal(flat[slots[4]], padded.stored[0])


def schema_of_three_groups() -> CacheSchema:
    """Latents, index keys and a compressed group: pages of 576, 132 and 584 bytes a token."""
    return CacheSchema(
        (
            GroupSpec(
                "tokens",
                (
                    PartSpec("latent", Fp8LatentLayout(512, 64), 0),
                    PartSpec("index", Fp8IndexKeyLayout(128), 0),
                ),
                page_size=8,
            ),
            GroupSpec(
                "compressed", (PartSpec("packed", PlainLayout(torch.bfloat16, 292), 0),), 2, 4
            ),
        )
    )


@pytest.mark.parametrize("pages", [(1, 3), (4,), (2, 1, 5)])
def test_d6_a_page_takes_all_its_own_parts_along(pages: tuple[int, ...]) -> None:
    """Move some pages away and back: codes and scales of their index rows go with them."""
    cache = CacheTensors(schema_of_three_groups(), {"tokens": 12, "compressed": 12})
    generator = torch.Generator().manual_seed(8)
    for pool in cache.pools.values():
        values = torch.randn(pool.num_slots, pool.layout.dim, generator=generator)
        pool.layout.write(pool, torch.arange(pool.num_slots), values)
    before = {part: pool.storage.clone() for part, pool in cache.pools.items()}
    away = [6 + i for i in range(len(pages))]
    for group in ("tokens", "compressed"):
        cache.copy_pages(group, pages, away)
        cache.poison(group, pages)
        cache.copy_pages(group, away, pages)
    for part, pool in cache.pools.items():
        kept = [page for page in range(12) if page not in away]
        assert torch.equal(pool.storage[kept], before[part][kept]), part
        slots = torch.tensor([page * pool.page_size + i for page in pages for i in range(2)])
        assert bool(pool.layout.gather(pool, slots).isfinite().all())
