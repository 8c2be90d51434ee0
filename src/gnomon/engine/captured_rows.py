"""How many rows of prefill steps are captured: what was wished, what the machine allows.

In:  EngineConfig, the device, the rows that a step may have.
Out: (rows, source, reason); ConfigError for a wish that could only be ignored.
Not here: which steps are captured then (runner.py), whose kernels can be (operators.py).
"""

from __future__ import annotations

from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError

DEFAULT_ROWS = 1024  # longer steps keep a GPU busy for longer than their launches take


def captured_rows(config: EngineConfig, device: str, num_tokens: int) -> tuple[int, str, str]:
    """0: every prefill step runs eagerly. ``num_tokens``: the most that a step has."""
    wished = config.max_captured_prefill_tokens
    why = ""
    if device != "cuda":
        why = f"there are no CUDA graphs on device {device}"
    elif config.enforce_eager:
        why = "enforce_eager is on"
    if why and wished:
        raise ConfigError(
            f"max_captured_prefill_tokens is {wished}, but {why}. Leave it out, or set it to 0."
        )
    if why:
        return 0, "machine" if device != "cuda" else "flag", why
    if wished is not None and wished > num_tokens:
        raise ConfigError(
            f"max_captured_prefill_tokens is {wished}, but no step has more than "
            f"max_num_batched_tokens = {num_tokens}. Lower the former or raise the latter."
        )
    if wished is not None:
        return wished, "flag", ""
    return min(DEFAULT_ROWS, num_tokens), "default", "longer steps hide their own launches"
