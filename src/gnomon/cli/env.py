"""`gnomon env`: versions and hardware, for a bug report.

In:  nothing.   Out: lines "name: value", or JSON.
Not here: what would be used for a model (explain.py).
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

import gnomon

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "fastapi",
    "uvicorn",
    "pydantic",
    "msgspec",
    "pyzmq",
    "openai",
    # Libraries of kernels that gnomon can use (attention/providers/external).
    "flash-mla",
    "deep-gemm",
    "flash-attn-3",
    "flashinfer-python",
    "vllm",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("env", epilog="\b\nExamples:\n  gnomon env --json > env.json")(env)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print versions and hardware, for a bug report."""
    facts = {**_software(), **_hardware()}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _software() -> dict[str, str]:
    facts = {
        "gnomon": gnomon.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def _hardware() -> dict[str, str]:
    import torch

    from gnomon.attention.providers.external.places import cuda_home

    facts = {
        "cpu": _cpu_name(),
        "cpu cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "torch threads": str(torch.get_num_threads()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "cuda of torch": torch.version.cuda or "none",
        "cuda toolkit": str(cuda_home() or "none: DeepGEMM, which compiles with nvcc, cannot run"),
    }
    if not torch.cuda.is_available():
        return {**facts, "gpus": "none"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"gpu {index}"] = (
            f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}, "
            f"{gpu.multi_processor_count} SMs"
        )
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
