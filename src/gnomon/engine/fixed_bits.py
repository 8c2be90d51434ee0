"""Deterministic runs: where an answer's bits can be kept from hanging on other requests.

In:  EngineConfig, the dtype, the device. Out: nothing, or ConfigError before weights are read.
Not here: the kernels that keep their bits (providers), padding on a CPU (batch.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from gnomon.attention.routes import DensePolicy
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError

FIXED_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = MappingProxyType(
    {
        "cpu": (torch.float32,),
        "cuda": (torch.float32, torch.bfloat16, torch.float16),
    }
)
"""Device -> dtypes in which an answer's bits can be made not to hang on other requests."""


def require_fixed_bits(config: EngineConfig, dtype: torch.dtype, device: str) -> None:
    """Refuse what a deterministic run cannot keep."""
    able = FIXED_DTYPES[device]
    name = str(dtype).removeprefix("torch.")
    if dtype not in able:
        names = ", ".join(str(one).removeprefix("torch.") for one in able)
        raise ConfigError(
            f"deterministic is on and dtype is {name}: on {device} the bits of an answer can be "
            f"kept apart from other requests in {names} only. Set dtype to float32, or leave "
            "deterministic out."
        )
    if config.dense_route == DensePolicy.ALWAYS:
        raise ConfigError(
            f"deterministic is on and dense_route is {config.dense_route}: the two routes "
            "round differently, and chunks of a prompt may take either. Leave dense_route out."
        )
