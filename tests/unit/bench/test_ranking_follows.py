"""`auto` takes the fastest measured provider for each cell of the results that are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.attention.dispatch import OpNeed
from gnomon.attention.providers.ranking import fastest
from gnomon.attention.routes import AttentionDims
from tools.rank_providers import rows_of

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "h200_ops.json"
CELLS = json.loads(RESULTS.read_text())["cells"]
WITHIN = 1.05  # times that repeat are within a few percent
DIMS = AttentionDims(
    num_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_topk=2048,
    index_num_heads=64,
    index_head_dim=128,
)


def need_of(row: dict[str, Any]) -> OpNeed:
    heads = row["num_heads"]
    field = "index_num_heads" if row["op"].startswith("index_") else "num_heads"
    is_index = row["op"].startswith("index_")
    return OpNeed(
        device="cuda",
        dtype=torch.bfloat16,
        dims=replace(DIMS, **{field: heads}),
        latent_layout=None if is_index else row["layout"],
        index_layout=row["layout"] if is_index else None,
        phase=row["phase"],
        page_size=64,
        capability=(9, 0),
        num_rows=row["num_rows"] or None,
        num_experts=heads if row["op"].startswith("moe") else None,
    )


def choices() -> list[tuple[str, list[dict[str, Any]]]]:
    """Cells in which at least two providers were timed."""
    found = []
    for cell in CELLS:
        rows = list(rows_of([cell]))
        for phase in sorted({str(row["phase"]) for row in rows}):
            own = [row for row in rows if row["phase"] == phase]
            if len(own) > 1:
                found.append((f"{cell['op']} {cell['size']} ({phase})", own))
    return found


CHOICES = choices()


def test_there_is_something_to_choose() -> None:
    assert len(CHOICES) >= 15


@pytest.mark.parametrize("rows", [rows for _, rows in CHOICES], ids=[name for name, _ in CHOICES])
def test_auto_follows_the_measurement(rows: list[dict[str, Any]]) -> None:
    order, source = fastest(rows[0]["op"], need_of(rows[0]))
    times = {row["provider"]: float(row["us"]) for row in rows}
    ranked = [name for name in order if name in times]
    taken = ranked[0] if ranked else "triton"  # the default where nothing is ranked
    assert times[taken] <= WITHIN * min(times.values()), (times, source)
