"""Compile kernels for GPUs that are not here, and report what the assembler made of them.

In:  `Build`s: a kernel by module and name, its signature and constants, options, an architecture.
Out: one `Report` per build: bytes of stack (spills; 0 in a good kernel), registers, shared memory,
     the WGMMA shapes in its PTX, the assembler's remarks about serialised WGMMA.
How: in a subprocess without TRITON_INTERPRET, which breaks compilation; what was compiled before is
     taken from .reports/triton_cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
MAX_SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a block may have, by architecture."""


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel for one architecture.

    ``signature``: every argument in order: "*bf16", "*fp32", "*u8", "*i32", "i32", "fp32", or
    "constexpr", whose value is in ``constants``. ``aligned``: arguments that are multiples of 16;
    by default every pointer. ``options``: num_warps, num_stages, maxnreg.
    """

    module: str
    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)
    arch: int = 90
    aligned: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """What a failing test calls it."""
        return f"{self.kernel} sm_{self.arch} {dict(self.constants)} {dict(self.options)}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a build came to."""

    label: str
    stack: int
    registers: int
    shared: int
    wgmma: tuple[str, ...]
    remarks: tuple[str, ...]
    error: str = ""
    arch: int = 90


def compile_all(builds: Sequence[Build]) -> list[Report]:
    """Compile in one subprocess; a build that fails has its ``error`` set."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(ROOT / ".reports" / "triton_cache")
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.triton.ahead_of_time"],
        input=json.dumps([asdict(build) for build in builds]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith("REPORTS ")]
    if not marked:
        raise RuntimeError(f"the compiling process failed:\n{done.stderr[-2000:]}")
    reports = json.loads(marked[0].removeprefix("REPORTS "))
    return [
        Report(**{**r, "wgmma": tuple(r["wgmma"]), "remarks": tuple(r["remarks"])}) for r in reports
    ]


def faults(reports: Sequence[Report]) -> list[str]:
    """What no kernel may have: errors, spills, more shared memory than there is, serial WGMMA."""
    found = []
    for r in reports:
        found += [f"{r.label}: {r.error}"] if r.error else []
        found += [f"{r.label}: {r.stack} bytes of stack"] if r.stack else []
        is_too_much = r.shared > MAX_SHARED[r.arch]
        found += [f"{r.label}: {r.shared} bytes of shared memory"] if is_too_much else []
        found += [f"{r.label}: {remark}" for remark in r.remarks]
    return found


def _compile(build: Build) -> Report:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(importlib.import_module(build.module), build.kernel)
    names = list(build.signature)
    pointers = tuple(name for name, kind in build.signature.items() if kind.startswith("*"))
    aligned = pointers if build.aligned is None else build.aligned
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=dict(build.signature),
        constexprs=dict(build.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", build.arch, 32)
    try:
        made = triton.compile(source, target=target, options=dict(build.options))
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[-400:]}"
        return Report(build.label, 0, 0, 0, (), (), said, build.arch)
    usage = _resource_usage(made.asm["cubin"])
    wgmma = sorted(
        set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", made.asm["ptx"]))
    )
    remarks = _remarks(made.asm["ptx"]) if wgmma else ()
    return Report(
        build.label,
        usage["STACK"],
        usage["REG"],
        made.metadata.shared,
        tuple(wgmma),
        remarks,
        arch=build.arch,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", shown)}


def _remarks(ptx: str) -> tuple[str, ...]:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path)]
        said = subprocess.run(
            [*command, "-o", f"{path}.o"], capture_output=True, text=True, check=False
        ).stderr
    return tuple(line for line in said.splitlines() if re.search(r"C751\d|serializ", line))


def _main() -> None:
    builds = [Build(**given) for given in json.load(sys.stdin)]
    sys.stdout.write("REPORTS " + json.dumps([asdict(_compile(b)) for b in builds]) + "\n")


if __name__ == "__main__":
    _main()
