"""How many bytes a device can still give, so that too large a cache is refused by name.

In:  a device; for the CPU, what Linux says of the machine and of the container's control group.
Out: bytes, or None where the system does not tell (then only the allocation itself can fail).
Not here: how much of it to take.
"""

from __future__ import annotations

from pathlib import Path

import torch

# Limit, usage and the name in memory.stat of file pages that go when they are needed, of cgroup v2
# and v1. A container sees its own group at the mount point.
CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def free_memory_bytes(device: torch.device | str, root: Path = Path("/")) -> int | None:
    """Bytes that can be had on `device` now; `root` is where the system's files are looked for."""
    where = torch.device(device)
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    bounds = [_machine_bytes(root), *(_cgroup_bytes(root, *names) for names in CGROUPS)]
    known = [bound for bound in bounds if bound is not None]
    return max(min(known), 0) if known else None


def _machine_bytes(root: Path) -> int | None:
    available = _field(root / "proc/meminfo", "MemAvailable:")
    return None if available is None else available * 1024


def _cgroup_bytes(root: Path, folder: str, limit: str, usage: str, cold: str) -> int | None:
    allowed = _number(root / folder / limit)
    used = _number(root / folder / usage)
    if allowed is None or used is None:
        return None
    return allowed - used + (_field(root / folder / "memory.stat", cold) or 0)


def _number(path: Path) -> int | None:
    """The one number in a file; None if there is no file, or no number ("max": no limit)."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    """The number after `name` at the start of a line."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
