"""The sampling values that a checkpoint's author recommends: generation_config.json.

In:  a model folder.
Out: `GenerationDefaults`: values by the names of gnomon's SamplingParams, and the end tokens. An
     absent file says nothing. `ConfigError` for a value out of range.
Not here: what a request says, which always wins (engine/sampling_params).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gnomon.models.config import ModelConfig
from gnomon.models.config_fields import Fields, read_json_object

FILE_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """`sampling`: only what the file states. `eos_token_ids`: its own, else the config's."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float | int] = field(default_factory=dict)


def read_generation_defaults(folder: Path, config: ModelConfig) -> GenerationDefaults:
    """Read the file if it is there. `do_sample: false` means greedy, whatever else it says."""
    path = folder / FILE_NAME
    if not path.exists():
        return GenerationDefaults(config.eos_token_ids)
    fields = Fields(read_json_object(path, "Copy it anew."), str(path))
    eos = fields.integers("eos_token_id", below=config.vocab_size) or config.eos_token_ids
    sampling: dict[str, float | int] = {}
    for name in ("temperature", "min_p"):
        if fields.has(name):
            sampling[name] = fields.number(name, minimum=0.0)
    for name in ("top_p", "repetition_penalty"):
        if fields.has(name):
            sampling[name] = fields.number(name)
    for name in ("top_p", "min_p"):
        if sampling.get(name, 0.0) > 1.0:
            raise fields.error(name, "a number up to 1", "Correct the file or remove the field.")
    if fields.has("top_k"):
        sampling["top_k"] = fields.integer("top_k", minimum=0)
    if not fields.flag("do_sample", default=True):
        sampling["temperature"] = 0.0
    if fields.has("max_new_tokens"):
        sampling["max_tokens"] = fields.integer("max_new_tokens")
    return GenerationDefaults(eos, sampling)
