"""How long a step takes at each length, dense and sparse: `python3 -m training.throughput ...`.

In:  the arguments of `training.train`.
Out: a line per kind of step: milliseconds, tokens a second, peak memory. Trains nothing of use.
"""

from __future__ import annotations

import time

import torch

from training.plans import PLANS
from training.train import Training, arguments


def main() -> None:
    """Time steps on random tokens."""
    args = arguments()
    plan = PLANS[args.plan]
    training = Training(plan, args)
    for is_sparse in (False, True):
        for length in (256, 512, 1024, 2048, 4096):
            ids = torch.randint(3, 4000, (plan.tokens // length, length), device=training.device)
            weight = (torch.rand(ids.shape, device=training.device) < 0.2).float()
            for count in (3, 10):
                torch.cuda.synchronize()
                since = time.monotonic()
                for _ in range(count):
                    training.one_step(is_sparse, ids, weight)
                torch.cuda.synchronize()
                took = (time.monotonic() - since) / count
            memory = torch.cuda.max_memory_allocated() / 2**30
            print(
                f"{'sparse' if is_sparse else 'dense'} {length}: {took * 1e3:.1f} ms, "
                f"{ids.numel() / took / 1e6:.2f} M tokens/s, peak {memory:.1f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
