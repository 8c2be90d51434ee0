"""Times of attention tiles on this GPU, one line a configuration; the tables in attention_tiles.py.

In:  optionally FLASHMLA=PATH of `_flashmla_C.abi3.so` (its time is printed beside ours).
Out: lines "operator shape tile splits  µs  TFLOP/s  GB/s  ratio"; ratio = FlashMLA's time / ours.
Kernels are compiled first, by a process per core, into Triton's cache. Cold L2, median of the runs.
Usage: python bench/tune_attention.py [prefill] [decode] [dense] [fixed]   (by default the first
     three; fixed: what cutting every list after so many keys costs a deterministic run)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.providers.external.flashmla import FlashMlaLibrary, find
from gnomon.attention.providers.external.padding import pad_operands
from gnomon.attention.providers.external.places import Places
from gnomon.attention.providers.triton.attention_dense import DenseTile, run_dense
from gnomon.attention.providers.triton.attention_sparse import ListCall, Splits
from gnomon.attention.providers.triton.attention_tiles import ListTile
from gnomon.bench.timing import Failure, time_calls

WIDTH = 2048
DEVICE = torch.device("cuda")
PLAIN, PACKED = PlainLayout(torch.bfloat16, 576), Fp8LatentLayout(512, 64)

FEW_PLAIN = [
    ListTile(16, 64, 4, 2, reads_ahead=True),
    ListTile(16, 64, 4, 2, reads_ahead=True, parts=4),
    ListTile(16, 64, 4, 2, reads_ahead=True, parts=2),
    ListTile(16, 32, 4, 3, reads_ahead=True),
    ListTile(16, 32, 4, 3, reads_ahead=True, parts=4),
]
FEW_PACKED = [
    ListTile(16, 64, 8, 2, reads_ahead=True),
    ListTile(16, 64, 8, 3, reads_ahead=True),
    ListTile(16, 32, 4, 2, reads_ahead=True),
    ListTile(16, 32, 4, 3, reads_ahead=True),
    ListTile(16, 32, 4, 4, reads_ahead=True),
]
MANY_PLAIN = [
    ListTile(64, 64, 8, 2, reads_ahead=True),
    ListTile(64, 64, 8, 2),
    ListTile(64, 64, 8, 2, parts=4),
    ListTile(64, 64, 8, 2, parts=2),
]
MANY_PACKED = [
    ListTile(64, 64, 8, 2),
    ListTile(64, 64, 8, 3, reads_ahead=True),
    ListTile(64, 32, 8, 3, reads_ahead=True),
]
MIDDLE = [ListTile(32, 64, 8, 2, reads_ahead=True), ListTile(32, 32, 8, 3, reads_ahead=True)]
DENSE = [DenseTile(128, 64, 8, 3), DenseTile(128, 128, 8, 2), DenseTile(128, 64, 8, 2)]
DENSE += [DenseTile(64, 64, 4, 3), DenseTile(128, 64, 4, 3)]


@dataclass(frozen=True, slots=True)
class Cell:
    """A shape and what to try on it."""

    layout: PlainLayout | Fp8LatentLayout
    num_rows: int
    num_heads: int
    tiles: list[ListTile]
    splits: tuple[int, ...] = (1,)

    @property
    def label(self) -> str:
        kind = "decode" if self.num_rows <= 256 else "prefill"
        return f"{kind} {self.layout.id} b{self.num_rows} h{self.num_heads}"


PREFILL = [
    Cell(PLAIN, 4096, 128, MANY_PLAIN),
    Cell(PLAIN, 4096, 64, MANY_PLAIN),
    Cell(PLAIN, 4096, 32, MIDDLE),
    Cell(PLAIN, 4096, 16, FEW_PLAIN),
    Cell(PACKED, 4096, 128, MANY_PACKED),
]
DECODE = [
    Cell(PACKED, 1, 16, FEW_PACKED, (16, 32)),
    Cell(PACKED, 16, 16, FEW_PACKED, (8, 16)),
    Cell(PACKED, 64, 16, FEW_PACKED, (2, 4)),
    Cell(PACKED, 128, 16, FEW_PACKED, (1, 2)),
    Cell(PACKED, 1, 64, MANY_PACKED, (16, 32)),
    Cell(PACKED, 16, 64, MANY_PACKED, (8,)),
    Cell(PACKED, 64, 64, MANY_PACKED, (2,)),
    Cell(PACKED, 128, 64, MANY_PACKED),
    Cell(PACKED, 1, 128, MANY_PACKED, (16, 32)),
    Cell(PACKED, 16, 128, MANY_PACKED, (4,)),
    Cell(PACKED, 64, 128, MANY_PACKED),
    Cell(PACKED, 128, 128, MANY_PACKED),
    Cell(PLAIN, 64, 16, FEW_PLAIN, (2, 4)),
    Cell(PLAIN, 64, 128, MANY_PLAIN),
]
FIXED = [
    Cell(PACKED, num_rows, num_heads, tiles, (1, 2, 4))
    for num_heads, tiles in ((128, [MANY_PACKED[1]]), (16, [FEW_PACKED[2]]))
    for num_rows in (1, 16, 64, 128, 4096)
]


def draw(cell: Cell, num_rows: int) -> ListCall:
    """Random operands: 32k keys for prefill, 32k tokens a request (up to 1M) for decode."""
    num_tokens = 32768 if num_rows > 256 else min(num_rows, 32) * 32768
    pool = cell.layout.allocate(num_tokens // 64, 64, DEVICE)
    for start in range(0, num_tokens, 32768):
        values = torch.randn(32768, 576, device=DEVICE, dtype=torch.bfloat16)
        cell.layout.write(pool, torch.arange(start, start + 32768, device=DEVICE), values)
    q = torch.randn(num_rows, cell.num_heads, 512, device=DEVICE, dtype=torch.bfloat16)
    q_rope = torch.randn(num_rows, cell.num_heads, 64, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.randint(num_tokens, (num_rows, WIDTH), device=DEVICE)
    count = torch.full((num_rows,), WIDTH, dtype=torch.int32, device=DEVICE)
    return ListCall(q, q_rope, pool, slots, count, 576**-0.5)


def peer(library: FlashMlaLibrary, call: ListCall) -> Callable[[], object]:
    """FlashMLA on the same work, its operands padded beforehand."""
    query, lists = pad_operands(call.q_latent, call.q_rope, call.slots, 128)
    if isinstance(call.pool.layout, PlainLayout):
        entries = call.pool.typed()[:, None]
        return lambda: library.prefill(query, entries, lists[:, None], call.scale, call.count)
    pages = call.pool.planes[0][:, :, None]
    form = (query[:, None], lists[:, None]) if len(query) <= 256 else (query[None], lists[None])
    *_, schedule = library.decode(form[0], pages, form[1], call.scale, None)
    return lambda: library.decode(form[0], pages, form[1], call.scale, schedule)


def tune_lists(cell: Cell, library: FlashMlaLibrary | None) -> Iterator[str]:
    """Lines of one cell."""
    call = draw(cell, cell.num_rows)
    calls: dict[str, Callable[[], object]] = {}
    if library is not None:
        calls["FlashMLA"] = peer(library, call)
    for tile in cell.tiles:
        for number in cell.splits:
            name = f"{tile.heads}x{tile.keys} w{tile.num_warps} s{tile.num_stages}"
            name += f"{' ahead' if tile.reads_ahead else ''}"
            name += f" r{tile.max_registers}" if tile.max_registers else ""
            name += f" in {tile.parts}" if tile.parts > 1 else ""
            name += f" /{number}"
            calls[name] = lambda t=tile, n=number: call.run(t, Splits(n))
    times = time_calls(calls, DEVICE, num_runs=7 if cell.num_rows > 256 else 15)
    theirs = times.get("FlashMLA")
    work = 2 * cell.num_rows * cell.num_heads * WIDTH * 1088
    size = cell.num_rows * WIDTH * cell.layout.bytes_per_token
    for name, timing in times.items():
        if isinstance(timing, Failure):
            yield f"{cell.label:34} {name:30} {timing.reason[:100]}"
            continue
        took = timing.median_us
        ratio = "" if theirs is None or isinstance(theirs, Failure) else theirs.median_us / took
        shown = f"{ratio:5.2f}x" if ratio else ""
        speed = f"{work / took / 1e6:7.1f} TF {size / took / 1e3:7.0f} GB/s"
        yield f"{cell.label:34} {name:30} {took:9.1f} us {speed} {shown}"


def tune_dense() -> Iterator[str]:
    """Causal prefill of 8192 rows, 16 heads of 192 and 128."""
    rows = 8192
    q, k = (torch.randn(rows, 16, 192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(rows, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    visible = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
    calls = {
        f"{t.rows}x{t.keys} w{t.num_warps} s{t.num_stages}": (
            lambda t=t: run_dense((q, k, v), visible, 192**-0.5, t)
        )
        for t in DENSE
    }
    for name, timing in time_calls(calls, DEVICE, num_runs=7).items():
        if isinstance(timing, Failure):
            yield f"dense 8192 h16 {name:30} {timing.reason[:100]}"
        else:
            speed = rows * rows * 16 * 320 / timing.median_us / 1e6
            yield f"dense 8192 h16 {name:30} {timing.median_us:9.1f} us {speed:7.1f} TF"


def compile_share(kinds: list[str], share: int, num_shares: int) -> None:
    """Run every num_shares-th configuration once on few rows, so that it is in the cache."""
    jobs: dict[tuple[object, ...], tuple[Cell, ListTile, int]] = {}
    for cell in chosen_cells(kinds):
        for tile in cell.tiles:
            for number in cell.splits:
                key = (cell.layout.id, cell.num_heads, tile, number > 1)
                jobs.setdefault(key, (cell, tile, number))
    for cell, tile, number in list(jobs.values())[share::num_shares]:
        run_quietly(lambda c=cell, t=tile, n=number: draw(c, 1).run(t, Splits(n)))


def run_quietly(call: Callable[[], object]) -> None:
    """A configuration that cannot run says so in the table, not here."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"not compiled: {str(error)[:80]}", file=sys.stderr)


def chosen_cells(kinds: list[str]) -> list[Cell]:
    cells = {"prefill": PREFILL, "decode": DECODE, "fixed": FIXED}
    return [cell for kind, of_kind in cells.items() if kind in kinds for cell in of_kind]


def main() -> None:
    arguments = sys.argv[1:]
    if "--share" in arguments:
        at = arguments.index("--share")
        share, num_shares = int(arguments[at + 1]), int(arguments[at + 2])
        compile_share(arguments[:at], share, num_shares)
        return
    kinds = arguments or ["prefill", "decode", "dense"]
    begin = time.time()
    num_shares = max(1, min(14, (os.cpu_count() or 2) - 1))
    command = [sys.executable, __file__, *kinds, "--share"]
    shares = [subprocess.Popen([*command, str(i), str(num_shares)]) for i in range(num_shares)]
    for process in shares:
        process.wait()
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    path = os.environ.get("FLASHMLA")
    library = find(Places(str(Path(path).parent))) if path else None
    for cell in chosen_cells(kinds):
        for line in tune_lists(cell, library):
            print(line, flush=True)
    for line in tune_dense() if "dense" in kinds else ():
        print(line, flush=True)
    print(f"done in {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
