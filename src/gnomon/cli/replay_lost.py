"""`gnomon replay` of a step that took its device with it: load the model, do the step again.

In:  a *-lost.json of gnomon serve --record, perhaps another provider or device, and the level of
     checked mode. Out: what was lost and what comes of it now, as lines or JSON. Exit code 0 if the
     step ran to its end and no request of it has to fail, else 1.
Not here: the step itself (engine/lost_step.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnomon.engine.lost_step import LostStep


def is_lost_step(file: Path) -> bool:
    """By its name."""
    from gnomon.engine.lost_step import SUFFIX

    return file.name.endswith(SUFFIX)


def replay_lost_step(
    file: Path, provider: str | None, device: str | None, check: str, as_json: bool
) -> int:
    """Do it again; the exit code."""
    from gnomon.cli.progress import LoadingDisplay
    from gnomon.engine.assembly import assemble
    from gnomon.engine.lost_step import again, config_for, read_lost_step

    lost = read_lost_step(file)
    changes: dict[str, Any] = {"check": check}
    if provider is not None:
        changes["attention_provider"] = provider
    config = config_for(lost, device, changes)
    if not as_json:
        _print_lost(lost)
    with LoadingDisplay(config.model or "the built-in model") as display:
        parts = assemble(config, display.report, lost.vocab_size)
    error, faults = "", {}
    try:
        faults = again(lost, parts, _tell)
    except Exception as problem:  # whatever it is: that the step fails again is the answer
        error = f"{type(problem).__name__}: {problem}"
    checker = parts.checker
    found = {
        "file": str(file),
        "step": lost.step_id,
        "lost_with": lost.error,
        "checks": 0 if checker is None else checker.num_checks,
        "error": error,
        "faults": faults,
    }
    print(json.dumps(found, indent=2)) if as_json else _print_found(found)
    return 1 if error or faults else 0


def _tell(done: int, total: int) -> None:
    end = "\n" if done == total else "\r"
    print(f"  caches of {done} of {total} requests", end=end, file=sys.stderr, flush=True)


def _print_lost(lost: LostStep) -> None:
    print(f"lost       step {lost.step_id}: {lost.error}")
    print(f"           {lost.num_rows} rows of {len(lost.requests)} requests")
    if lost.num_unknown:
        print(f"           {lost.num_unknown} tokens had not come to the host: 0 stands for each")


def _print_found(found: dict[str, Any]) -> None:
    if found["error"]:
        print(f"again      it failed: {found['error']}")
    for name, why in found["faults"].items():
        print(f"again      request {name}: {why}")
    if not found["error"] and not found["faults"]:
        print("again      it ran to its end, and no request of it has to fail")
    if found["checks"]:
        print(f"           {found['checks']} checks of operators")
