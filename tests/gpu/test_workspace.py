"""On a GPU: prefill by way of a workspace = prefill over the packed pool, in V3.2's widths."""

from __future__ import annotations

import pytest
import torch

from gnomon.attention.geometry import build_geometry
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.ops.attend import attend_key_set
from gnomon.attention.ops.workspace import UnpackedMla

pytestmark = pytest.mark.gpu

PAGE, WIDTH = 64, 512


@pytest.mark.parametrize("num_heads", [16, 128])
def test_workspace_equals_packed(num_heads: int) -> None:
    from gnomon.attention.providers.triton import PROVIDER, workspace

    kernels = PROVIDER.kernels
    generator = torch.Generator("cuda").manual_seed(num_heads)
    query, kv = [300, 77, 200], [300, 4000, 1200]
    pages, first = [], 1
    for length in kv:
        count = -(-length // PAGE)
        pages.append(list(range(first + count - 1, first - 1, -1)))
        first += count
    geometry = build_geometry(query, kv, {"tokens": pages}, page_size=PAGE, device="cuda")
    layout = Fp8LatentLayout(512, 64).computing_in(torch.bfloat16)
    pool = layout.allocate(first, PAGE, device="cuda")
    values = torch.randn(first * PAGE, 576, device="cuda", generator=generator)
    layout.write(pool, torch.arange(first * PAGE, device="cuda"), values)
    rows = geometry.rows
    count = rows.kv_len.clamp_max(WIDTH)
    noise = torch.rand(rows.num_rows, max(kv), device="cuda", generator=generator)
    noise.masked_fill_(torch.arange(max(kv), device="cuda") >= rows.kv_len[:, None], -1)
    ids = noise.topk(WIDTH).indices
    behind = torch.arange(WIDTH, device="cuda") >= count[:, None]
    ids = ids.masked_fill(behind, 1 << 30).sort(1).values.masked_fill(behind, -1)
    keys = KeySet(rows, (ListSegment("tokens", Space.POSITION, ids.int(), count),))
    q = [
        torch.randn(rows.num_rows, num_heads, n, device="cuda", generator=generator).bfloat16()
        for n in (512, 64)
    ]
    unpacked = UnpackedMla(kernels["sparse_mla"], kernels["context_gather"], workspace.move_slots)
    assert unpacked.pays(pool, rows)
    run = (kernels, (q[0], q[1]), pool, keys, geometry.tables["tokens"], 192**-0.5)
    packed, plain = attend_key_set(*run), attend_key_set(*run, unpacked)
    torch.testing.assert_close(plain[0], packed[0], atol=2**-7, rtol=2**-7)
    torch.testing.assert_close(plain[1], packed[1], atol=2e-3, rtol=1e-3)
