"""Which builds DeepGEMM's cache on the disk holds already, so that no process starts for them.

In:  the library, a device; the jobs of deepgemm_builds.py, as JSON texts.
Out: `BuiltJobs`: `holds(text)`, and `remember(text)` after a build that succeeded.
The memory lies in the library's own cache folder, one small file for each job: whoever wipes the
cache wipes the memory. A file is named by the digest of what it says, and says all that a kernel
hangs on: the job, the library's files, nvcc, the GPU, the library's settings. One that says
anything else (damaged, of another library) counts as not there. Files are put in place whole, so
that many processes may remember at once. If the memory is wrong, a kernel is built at its first
use.
Not here: the builds, the kernels in that cache (both the library's own).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gnomon.attention.providers.external.places import cuda_home

FOLDER = "DG_JIT_CACHE_DIR"
SETTINGS = "DG_JIT_"
COMPILER = "DG_JIT_NVCC_COMPILER"


@dataclass(frozen=True, slots=True)
class BuiltJobs:
    """``identity``: what the kernels of all jobs hang on (module docstring), as JSON."""

    folder: Path
    identity: str

    @classmethod
    def of(cls, library: Any, device: torch.device) -> BuiltJobs:
        """The memory for a library on a device, as the environment says now."""
        known = {
            "library": _files(Path(library.__file__).parent),
            "compiler": _file(_compiler()),
            "device": _device(device),
            "settings": _settings(),
        }
        return cls(cache_folder() / "cache" / "gnomon", json.dumps(known, sort_keys=True))

    def holds(self, job: str) -> bool:
        """Whether the job was built before, by whomever, into this cache."""
        with suppress(OSError, UnicodeDecodeError):
            return self._path(job).read_text(encoding="utf-8") == self._text(job)
        return False

    def remember(self, job: str) -> None:
        """The job was built. A folder that cannot be written to is nobody's fault."""
        path = self._path(job)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self._text(job))
            os.replace(name, path)

    def _text(self, job: str) -> str:
        return f"{self.identity}\n{job}\n"

    def _path(self, job: str) -> Path:
        digest = hashlib.sha256(self._text(job).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"


def cache_folder() -> Path:
    """Where the library keeps its kernels."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else Path(os.environ.get("HOME") or Path.home()) / ".deep_gemm"


def _settings() -> dict[str, str]:
    """What the environment tells the library, but for the place of its cache."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(SETTINGS) and name != FOLDER
    }


def _compiler() -> Path | None:
    given, home = os.environ.get(COMPILER), cuda_home()
    if given:
        return Path(given)
    return None if home is None else home / "bin" / "nvcc"


def _files(package: Path) -> list[list[Any]]:
    """The library's code: its compiled modules, and the first one of its Python files."""
    return [_file(path) for path in sorted({*package.glob("*.so"), package / "__init__.py"})]


def _file(path: Path | None) -> list[Any]:
    """A file's place, size and time, as far as it is there."""
    if path is None:
        return []
    with suppress(OSError):
        found = path.stat()
        return [str(path), found.st_size, found.st_mtime_ns]
    return [str(path)]


def _device(device: torch.device) -> list[Any]:
    if device.type != "cuda":
        return [device.type]
    found = torch.cuda.get_device_properties(device)
    return [found.name, found.major, found.minor, found.multi_processor_count]
