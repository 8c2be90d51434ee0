"""Where and with what a verification ran: for its report.

Out: the command line, versions of packages, the machine. Plain values.
"""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gnomon

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")


def surroundings() -> dict[str, Any]:
    """date, command, versions, machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["gnomon", *_without_secrets(sys.argv[1:])]),
        "versions": _versions(),
        "machine": _machine(),
    }


def _without_secrets(arguments: list[str]) -> list[str]:
    """A report may be shown to others; a key may not."""
    shown = []
    for place, argument in enumerate(arguments):
        if argument.startswith("--api-key="):
            argument = "--api-key=***"
        shown.append("***" if place and arguments[place - 1] == "--api-key" else argument)
    return shown


def _versions() -> dict[str, str]:
    found = {"gnomon": gnomon.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _machine() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()
