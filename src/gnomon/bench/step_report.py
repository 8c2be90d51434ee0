"""Results of `gnomon bench step` as lines and as JSON, beside another engine's figures if given.

In:  StepResults; perhaps a file of a peer's times. Out: text, plain values, a picture.
A peer's file maps "decode BxL" and "prefill BxL" to milliseconds, beside the ceilings of its own
run ("copy_gb_s", "matmul_tflop_s"): its times are shown as they are and scaled: those of decode by
the ratio of the copy ceilings, those of prefill by that of the products. Where the file says
"has_head": false, ours are compared without the vocabulary's product. "layer_us" maps steps to the
microseconds of one layer by class (step_profile.py) and its "span".
Not here: the measurements (step.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gnomon.bench.ceilings import Ceilings
from gnomon.bench.result_files import new_figure, save_figure
from gnomon.bench.step import StepCell, StepResult
from gnomon.errors import ConfigError

HEADING = (
    f"{'step':<22} {'device ms':>10} {'p10..p90':>16} {'head':>6} {'host ms':>8} {'launches':>8} "
    f"{'peer ms':>8} {'scaled':>8} {'ours/peer':>9}"
)
SHOWN_KERNELS = 24
SPAN = "span"


class Peer:
    """Another engine's times of the same steps."""

    def __init__(self, path: Path | None) -> None:
        """Read the file; None: nothing to compare with."""
        self._times: dict[str, float] = {}
        self._layers: dict[str, dict[str, float]] = {}
        self._copy, self._matmul, self.has_head = 1.0, 1.0, True
        if path is None:
            return
        try:
            values = json.loads(path.read_text())
            self._times = {str(k): float(v) for k, v in values["milliseconds"].items()}
            self._copy = float(values["copy_gb_s"]) * 1e9
            self._matmul = float(values["matmul_tflop_s"]) * 1e12
            self.has_head = bool(values.get("has_head", True))
            self._layers = {str(k): dict(v) for k, v in values.get("layer_us", {}).items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"--peer {path}: {type(error).__name__} {error}; it has to be JSON with "
                '"milliseconds": {"decode 64x8192": 3.75, ...}, "copy_gb_s" and "matmul_tflop_s".'
            ) from None

    def milliseconds(self, cell: StepCell) -> float | None:
        """As the peer measured it."""
        return self._times.get(cell_name(cell))

    def layer(self, cell: StepCell, ceilings: Ceilings) -> dict[str, float]:
        """One layer by class, scaled as the step is; empty where the file has none."""
        scale = self._scale(cell, ceilings)
        return {kind: us * scale for kind, us in self._layers.get(cell_name(cell), {}).items()}

    def _scale(self, cell: StepCell, ceilings: Ceilings) -> float:
        if cell.kind == "decode":
            return self._copy / ceilings.copy_bytes_s
        return self._matmul / ceilings.matmul_flop_s

    def scaled(self, cell: StepCell, ceilings: Ceilings) -> float | None:
        """The same on a device of today's ceilings."""
        taken = self.milliseconds(cell)
        return None if taken is None else taken * self._scale(cell, ceilings)

    def ratio(self, result: StepResult, ceilings: Ceilings) -> float | None:
        """Our time over the peer's scaled one, of the same work."""
        scaled = self.scaled(result.cell, ceilings)
        if scaled is None or result.device is None:
            return None
        own = result.device.median_us
        if not self.has_head and result.head is not None:
            own -= result.head.median_us
        return own / 1000 / scaled


def cell_name(cell: StepCell) -> str:
    """``decode 64x8192``: batch and length."""
    return f"{cell.kind} {cell.batch}x{cell.length}"


def result_line(result: StepResult, peer: Peer, ceilings: Ceilings) -> str:
    """One line of the table."""
    title = cell_name(result.cell)
    if result.device is None or result.host is None:
        return f"{title:<22} -  {result.reason}"
    device, host = result.device, result.host
    spread = f"{device.p10_us / 1000:.2f}..{device.p90_us / 1000:.2f}"
    head = "-" if result.head is None else f"{result.head.median_us / 1000:.2f}"
    launches = str(result.num_launches) if result.kernels else "-"
    line = (
        f"{title:<22} {device.median_us / 1000:>10.3f} {spread:>16} {head:>6} "
        f"{host.median_us / 1000:>8.2f} {launches:>8}"
    )
    theirs, scaled = peer.milliseconds(result.cell), peer.scaled(result.cell, ceilings)
    ratio = peer.ratio(result, ceilings)
    if theirs is None or scaled is None or ratio is None:
        return line
    return f"{line} {theirs:>8.2f} {scaled:>8.2f} {ratio:>9.2f}"


def kernel_lines(result: StepResult) -> list[str]:
    """The dearest kernels of one step."""
    return [
        f"    {kernel.total_us:>9.1f} us {kernel.count:>5} x  {kernel.name[:90]}"
        for kernel in result.kernels[:SHOWN_KERNELS]
    ]


def layer_lines(result: StepResult, peer: Peer, ceilings: Ceilings) -> list[str]:
    """One layer by class, the dearest first, beside the peer's."""
    layer, theirs = result.layer, peer.layer(result.cell, ceilings)
    if layer is None:
        return []
    rows = [
        (kind, us, f"{layer.counts[kind]:.0f}", theirs.get(kind))
        for kind, us in sorted(layer.classes.items(), key=lambda item: -item[1])
    ]
    total = sum(layer.counts.values())
    rows.append((SPAN, layer.span_us, f"{total:.0f}", theirs.get(SPAN)))
    lines = [f"    one layer, mean of {layer.num_layers:<9} {'us':>8} {'launches':>8} {'peer':>8}"]
    for kind, us, count, peer_us in rows:
        beside = "" if peer_us is None else f" {peer_us:>8.0f}"
        lines.append(f"    {kind:<28} {us:>8.1f} {count:>8}{beside}")
    return lines


def as_json(
    results: Sequence[StepResult], peer: Peer, ceilings: Ceilings, run: dict[str, Any]
) -> dict[str, Any]:
    """Everything that was measured, and the peer's figures beside it."""
    return {
        "run": run,
        "ceilings": asdict(ceilings),
        "steps": [
            {
                "step": cell_name(result.cell),
                **asdict(result),
                "num_launches": result.num_launches,
                "peer_layer_us": peer.layer(result.cell, ceilings),
                "peer_ms": peer.milliseconds(result.cell),
                "peer_scaled_ms": peer.scaled(result.cell, ceilings),
                "ratio_to_peer": peer.ratio(result, ceilings),
            }
            for result in results
        ],
    }


def draw(
    results: Sequence[StepResult], peer: Peer, ceilings: Ceilings, path: Path, title: str
) -> None:
    """A point per step, from p10 to p90 a line, the peer's scaled time as a cross; milliseconds."""
    shown = [(r.cell, r.device) for r in results if r.device is not None]
    figure = new_figure(9, 1 + 0.35 * max(1, len(shown)))
    axes = figure.add_subplot()
    for place, (cell, taken) in enumerate(shown):
        middle, low, high = (us / 1000 for us in (taken.median_us, taken.p10_us, taken.p90_us))
        axes.plot([low, high], [place, place], color="black", linewidth=1.2)
        axes.plot([middle], [place], "o", color="tab:blue")
        theirs = peer.scaled(cell, ceilings)
        if theirs is not None:
            axes.plot([theirs], [place], "x", color="tab:red")
    axes.set_yticks(range(len(shown)), [cell_name(cell) for cell, _ in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms on the device: median, p10 to p90; cross: the peer's, scaled")
    axes.set_title(title, fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    save_figure(figure, path)
