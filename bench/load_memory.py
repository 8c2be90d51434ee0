"""Peak memory of loading a checkpoint, mapped pages included, against the law of issue 2.

In:  the size of the checkpoint (default 2 GiB in 4 shards); a folder for it (default: a new one
     that is removed afterwards).
Out: a line per case (stored dtype, engine dtype): loaded weights, peak, allowed, seconds; exit code
     1 if a peak is above 1.15 × loaded weights + 100 MB.
How: each load runs in a fresh process. Its peak is VmHWM of /proc/self/status, the most memory that
     was ever resident: anonymous and mapped pages. `whole` is all of it, interpreter and torch
     included; `load` is what came on top of the memory in use just before the load.
Run: OMP_NUM_THREADS=1 python bench/load_memory.py [--gib 2] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from gnomon.models.config import BlockFp8, Family, ModelConfig
from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.params import param_specs
from gnomon.models.tiny_shapes import tiny_shape

FACTOR, SLACK_BYTES = 1.15, 100_000_000
NUM_SHARDS = 4
HIDDEN, INNER, NUM_EXPERTS = 1024, 512, 32
EXPERT_LAYER = 3 * HIDDEN * INNER * NUM_EXPERTS  # elements of a layer's routed experts

STREAMED = "params = load_model_params(folder, read_config(folder), dtype)"
MEASURE = """
import json, sys, time
import torch
from pathlib import Path
from gnomon.models.config_reading import read_config
from gnomon.models.loading import load_model_params

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

folder, dtype = sys.argv[1], getattr(torch, sys.argv[2])
torch.zeros(1 << 20).bfloat16().float()  # the first use of a kernel loads its library
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew from here
before, start = status("VmRSS"), time.perf_counter()
exec(sys.argv[3])
seconds = time.perf_counter() - start
loaded = sum(value.nbytes for value in params.values())
peak = status("VmHWM")
print(json.dumps({"loaded": loaded, "before": before, "peak": peak, "seconds": seconds}))
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """One load, in bytes and seconds. `before`: resident when the load began."""

    loaded: int
    before: int
    peak: int
    seconds: float

    @property
    def on_top(self) -> int:
        """What the load added to the process at its peak."""
        return self.peak - self.before


def shape_of(num_bytes: int) -> dict[str, object]:
    """A config.json whose weights take about `num_bytes` in bfloat16: wide mixture layers."""
    wide = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "n_routed_experts": NUM_EXPERTS,
        "vocab_size": 4096,
        "torch_dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "num_hidden_layers": 1 + max(1, round(num_bytes / 2 / EXPERT_LAYER)),
    }
    return tiny_shape(Family.DEEPSEEK_V32) | wide


def blank_params(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Parameters that share a few megabytes of storage: what is measured is not their values."""
    specs = param_specs(config)
    most = max(torch.Size(spec.shape).numel() for spec in specs)
    values = torch.randn(most).bfloat16()
    return {spec.name: values[: torch.Size(spec.shape).numel()].view(spec.shape) for spec in specs}


def write_checkpoint(folder: Path, num_bytes: int, fp8: bool, shards: int = NUM_SHARDS) -> None:
    """Write a checkpoint of `num_bytes` in bfloat16 (half of it in block FP8)."""
    config = read_config(shape_of(num_bytes))
    block = BlockFp8(128, 128, True, ()) if fp8 else None
    save_checkpoint(folder, config, blank_params(config), shards=shards, fp8=block)


def measure(folder: Path, dtype: str, load: str = STREAMED) -> Measured:
    """Load the folder in a fresh process and read its memory. `load` is what is run there."""
    command = [sys.executable, "-c", MEASURE, str(folder), dtype, load]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Measured(**json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size in bfloat16")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    print(
        f"{'stored':<10}{'engine':<10}{'loaded':>10}{'load':>10}{'whole':>10}{'allowed':>10}",
        end="",
    )
    print(f"{'seconds':>9}  (MB)")
    is_lawful = True
    try:
        for stored in ("bfloat16", "fp8"):
            write_checkpoint(root / stored, int(options.gib * 2**30), stored == "fp8")
            for engine in ("bfloat16", "float32"):
                result = measure(root / stored, engine)
                allowed = FACTOR * result.loaded + SLACK_BYTES
                is_lawful &= result.on_top <= allowed
                row = [result.loaded, result.on_top, result.peak, allowed]
                sizes = "".join(f"{value / 1e6:>10.0f}" for value in row)
                print(f"{stored:<10}{engine:<10}{sizes}{result.seconds:>9.1f}", flush=True)
            shutil.rmtree(root / stored)
    finally:
        shutil.rmtree(root)
    print("law kept" if is_lawful else "LAW BROKEN: a load took more than allowed")
    return 0 if is_lawful else 1


if __name__ == "__main__":
    sys.exit(main())
