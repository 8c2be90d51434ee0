"""Models of a verification: the same weights on every device, loaded once.

In:  a source, a dtype, a device, positions, whether FP8 weights stay so.
Out: LoadedModels. Weights of a random model are drawn on the CPU and then moved: a GPU that draws
     for itself gets other bits, and could not be compared with the CPU or with transformers. They
     are drawn once for all configurations of the same shapes.
Not here: reading folders and drawing (models/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from gnomon.attention.block_fp8 import BlockFp8Weight
from gnomon.models.generation_defaults import GenerationDefaults
from gnomon.models.linear import Param
from gnomon.models.params import param_specs
from gnomon.models.random_model import random_weights
from gnomon.models.registry import build_model
from gnomon.models.sources import LoadedModel, ModelSource, open_model


class Weights:
    """Owner of the weights that a verification has drawn."""

    def __init__(self) -> None:
        self._drawn: dict[object, Mapping[str, Param]] = {}

    def open(
        self,
        source: ModelSource,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        has_fp8: bool,
    ) -> LoadedModel:
        """The model on `device`."""
        if source.folder is not None:
            return open_model(source, dtype, device, None, num_positions, has_fp8)
        shapes = tuple((spec.name, spec.shape) for spec in param_specs(source.config))
        here = (shapes, source.seed, dtype, has_fp8)
        there = (*here, device)
        if here not in self._drawn:
            cpu = torch.device("cpu")
            self._drawn[here] = random_weights(source.config, source.seed, dtype, cpu, has_fp8)
        if there not in self._drawn:
            drawn = self._drawn[here].items()
            self._drawn[there] = {name: _moved(param, device) for name, param in drawn}
        config = source.config
        return LoadedModel(
            model=build_model(config, self._drawn[there], num_positions),
            config=config,
            generation_defaults=GenerationDefaults(config.eos_token_ids),
            folder=None,
            revision=f"verify-{source.seed}",
            label=source.label,
            dtype=dtype,
            extras=(),
        )


def _moved(param: Param, device: torch.device) -> Param:
    if isinstance(param, BlockFp8Weight):
        return replace(param, codes=param.codes.to(device), scales=param.scales.to(device))
    return param.to(device)
