"""SchedulerConfig: the limits that the scheduler keeps.

In:  numbers from flags, checked here. Out: a frozen value. Errors: ConfigError names the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.errors import ConfigError

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    max_model_len           tokens of prompt and output together
    max_num_seqs            requests that run at once
    max_num_batched_tokens  rows of one step; at least max_num_seqs, so that a step of decoding fits
    max_prefill_chunk       rows of one request in one step; 0: no limit but the one above
    policy                  "fcfs", or "priority": lower number first, ties by arrival, and a
                            request may push out running ones of a higher number
    max_queue               requests that may wait; more are refused with OverloadError
    enable_prefix_cache     share full pages of equal content between requests
    reserve                 share of the cache that stays free when a request starts beside
                            others, so that these can grow for a while before one must yield
    retry_after_s           what a refused client is told to wait, seconds
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_prefill_chunk: int = 0
    policy: Policy = "fcfs"
    max_queue: int = 1024
    enable_prefix_cache: bool = True
    reserve: float = 0.01
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse limits under which requests could not run."""
        for name, low in (("max_model_len", 2), ("max_num_seqs", 1), ("max_queue", 1)):
            value = getattr(self, name)
            if value < low:
                raise ConfigError(f"{name} is {value}; it must be at least {low}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"= {self.max_num_seqs}: a step could not decode them all; raise the former or "
                "lower the latter"
            )
        if self.max_prefill_chunk < 0:
            raise ConfigError(
                f"max_prefill_chunk is {self.max_prefill_chunk}; it must be 0 (no limit) or more"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy is {self.policy!r}; it must be 'fcfs' or 'priority'")
        if not 0.0 <= self.reserve < 1.0:
            raise ConfigError(f"reserve is {self.reserve}; it must lie in [0, 1)")
