"""Turn a results file of `gnomon bench ops` into rows for attention/providers/ranking.py.

In:  the JSON that `gnomon bench ops --json FILE` wrote; the name under which it is kept.
Out: Measured(...) lines to be pasted into MEASURED, one per operator, phase, layout, number of
     heads and, for attention, of rows: read from a cell's size ("decode b64 h16, fp8").
Usage: python tools/rank_providers.py docs/results/bench_ops_h200.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gnomon.attention.by_rows import OPERATORS_BY_ROWS
from gnomon.attention.providers.ranking import Measured, table_of

LAYOUTS = {"sparse_mla": {"bf16": "bf16_576", "fp8": "fp8_ds_mla_656"}}
BY_INDEX_LAYOUT = ("index_scores", "index_scores_paged")
PHASES = {"index_scores": "prefill", "dense_mha": "prefill"}


def rows_of(cells: list[Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    """A row for each provider that was timed in a cell; cells of no phase count for both."""
    for cell in cells:
        op, size = str(cell["op"]), str(cell["size"])
        words = set(re.findall(r"[a-z0-9_]+", size.lower()))
        heads = re.search(r"\bh(\d+)\b|\b(\d+) experts\b", size.lower())
        batch = re.search(r"\bb?(\d+)(?: rows)?\b", size.lower())
        layout = next((full for word, full in LAYOUTS.get(op, {}).items() if word in words), None)
        named = next((phase for phase in ("prefill", "decode") if phase in words), None)
        phase = named or PHASES.get(op)
        for entry in cell["times"]:
            if entry["timing"] is None:
                continue
            for one in ("prefill", "decode") if phase is None else (phase,):
                yield {
                    "op": op,
                    "phase": one,
                    "layout": "index_k_132" if op in BY_INDEX_LAYOUT else layout,
                    "num_heads": int(heads[1] or heads[2]) if heads else 1,
                    "num_rows": int(batch.group(1)) if batch and op in OPERATORS_BY_ROWS else 0,
                    "provider": entry["provider"],
                    "us": entry["timing"]["median_us"],
                    "shape": size,
                }


def line_of(one: Measured) -> str:
    """One entry of MEASURED, as code."""
    order = ", ".join(f'"{name}"' for name in one.order) + ("," if len(one.order) == 1 else "")
    layout = "None" if one.layout is None else f'"{one.layout}"'
    fields = f'"{one.op}", "{one.phase}", {layout}, {one.num_heads}, ({order})'
    rows = f", num_rows={one.num_rows}" if one.num_rows else ""
    return f"    Measured({fields}, _H200{rows}),"


def main(arguments: list[str]) -> int:
    """Print the lines for one results file; those where there was a choice."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    found = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    for one in table_of(rows_of(found["cells"]), arguments[0]):
        if len(one.order) > 1:
            print(line_of(one))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
