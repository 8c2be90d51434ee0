"""Random weights for any shape: no file, no download, the same bits from the same seed.

In:  a `ModelConfig`, a seed, a dtype, a device.
Out: a tensor per parameter. Matrices N(0, 1 / fan-in), embedding N(0, 1), norm weights 1 + 0.1 N,
     index key bias 0.1 N, router correction bias 0.05 N (oracle_math §3.1): logits have a standard
     deviation near 1 and no part of the maths is switched off. transformers' own initialisation
     (std 0.02, biases 0, norms 1) hides faults and is not used.
Not here: shapes (tiny_shapes), meaning: the text of such a model says nothing.

Each tensor has its own generator, seeded with (seed, name), and is drawn in float32: it does not
change when another layer is added, nor with the dtype but for its rounding.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from gnomon.models.config import ModelConfig
from gnomon.models.params import ParamSpec, param_dtype, param_specs, with_tied_head


def random_params(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Every parameter of the model by its engine name, in `dtype` unless it is kept in float32."""
    params: dict[str, Tensor] = {}
    for spec in param_specs(config):
        values = _draw(spec, seed)
        if len(spec.shape) > 1:
            values = values.to(dtype)  # also where it is kept in float32: as a file would hold it
        params[spec.name] = values.to(device, param_dtype(spec, dtype))
    return with_tied_head(config, params)


def _draw(spec: ParamSpec, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    noise = torch.empty(spec.shape, dtype=torch.float32).normal_(generator=generator)
    name = spec.name
    if name == "embed.weight":
        return noise
    if name.endswith("norm.weight"):
        return noise.mul_(0.1).add_(1.0)
    if name.endswith("k_norm.bias"):
        return noise.mul_(0.1)
    if name.endswith("router.bias"):
        return noise.mul_(0.05)
    return noise.mul_(math.pow(spec.shape[-1], -0.5))
