"""What bounds a plan: the bytes it may hold at once, and what the providers hold per element.

In:  flags of the engine (Budget) and the bound providers' statements (Capabilities).
Out: two frozen values for plan.py and its chunk planners.
Not here: the chunks themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import ConfigError

__all__ = ["Budget", "Capabilities"]


@dataclass(frozen=True, slots=True)
class Budget:
    """score_bytes: most bytes that one chunk of scores holds, by the count of ``score_bytes()``
    in score_chunks.py; also the bound of one row block of dense scores. context_rows: most keys
    that the dense route gathers and expands at once; at least a page.
    """

    score_bytes: int = 64 << 20
    context_rows: int = 8192

    def __post_init__(self) -> None:
        if self.score_bytes < 1 or self.context_rows < 1:
            raise ConfigError(
                f"budget: score_bytes {self.score_bytes}, context_rows {self.context_rows}; "
                "each must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the chosen providers keep in memory, and what they can do. Defaults fit `torch`.

    has_dense: the dense route can run with this cache layout.
    holds_head_scores: index scores exist per head, fp32 [rows, heads, keys], before their sum.
    holds_paged_keys: a paged chunk gathers keys for each row, fp32 [rows, keys, dim].
    holds_dense_scores: dense attention holds fp32 [rows, heads, keys].
    max_paged_rows: spans with at most so many rows to score are batched with other requests.
    has_fixed_width: index lists are as wide as any can get, since kernels are compiled for a width.
    """

    has_dense: bool = True
    holds_head_scores: bool = True
    holds_paged_keys: bool = True
    holds_dense_scores: bool = True
    max_paged_rows: int = 8
    has_fixed_width: bool = False
