"""Which class computes which model family.

In:  a ModelConfig, and the parameters by their internal names (models/params.py).
Out: a model ready to run.
Not here: reading configs and weights (sources.py).
"""

from __future__ import annotations

from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.models.config import Family, ModelConfig
from gnomon.models.sparse_mla_model import SparseMlaModel

# Both families are one skeleton (oracle_math.md §1.1); what differs is in their ModelConfig.
_MODELS: dict[Family, type[SparseMlaModel]] = {
    Family.DEEPSEEK_V32: SparseMlaModel,
    Family.GLM_MOE_DSA: SparseMlaModel,
}


def build_model(
    config: ModelConfig, params: dict[str, Tensor], num_positions: int | None = None
) -> SparseMlaModel:
    """Put a model together; ``num_positions`` bounds the rotary tables (default: the config's)."""
    kind = _MODELS.get(config.model_type)
    if kind is None:
        raise ConfigError(
            f"model_type is {config.model_type!r}; gnomon builds {', '.join(_MODELS)}"
        )
    return kind(config, params, num_positions or config.max_position_embeddings)
