"""Which machine and which software a benchmark ran on: the heading of every result file.

In:  nothing, or a device. Out: plain values for JSON.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def describe_run(device: torch.device) -> dict[str, Any]:
    """Machine, versions, command and time of this run."""
    found: dict[str, Any] = {
        "machine": _device_name(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "gnomon": _version("gnomon"),
        "command": shlex.join(["gnomon", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["capability"] = list(torch.cuda.get_device_capability(device))
    return found


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
