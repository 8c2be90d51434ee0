"""How many pages of each group fit a byte budget.

In:  a schema, the bytes, and the most requests and tokens that run at once.
Out: pages per group, the null page included, in one proportion: the same number of tokens fits
     every group that grows with tokens; groups per request have enough for every request.
Not here: allocation (tensors.py); which budget to take (the engine's configuration).
"""

from __future__ import annotations

import math

from gnomon.cache.rules import Checkpoint, Paged, Private, Window
from gnomon.cache.schema import CacheSchema, GroupSpec
from gnomon.errors import ConfigError


def pages_for_budget(
    schema: CacheSchema, num_bytes: int, *, max_num_requests: int = 1, num_step_tokens: int = 1
) -> dict[str, int]:
    """Most pages per group whose bytes, all together, are at most `num_bytes`.

    ConfigError, naming the least budget, if not even one span of tokens fits.
    """
    fixed = {g.name: _fixed_pages(g, max_num_requests, num_step_tokens) for g in schema.groups}
    growing = [group for group in schema.groups if not group.is_per_request]
    span_tokens = math.lcm(*(group.tokens_per_page for group in growing))
    per_span = {group.name: span_tokens // group.tokens_per_page for group in growing}
    fixed_bytes = sum(schema.bytes_per_page(name) * count for name, count in fixed.items())
    span_bytes = sum(schema.bytes_per_page(name) * count for name, count in per_span.items())
    least = fixed_bytes + span_bytes
    if num_bytes < least:
        raise ConfigError(
            f"a cache of {num_bytes} bytes is too small: {max_num_requests} running requests and "
            f"{span_tokens} tokens need at least {least}. Raise --kv-cache-memory, or lower "
            f"--max-num-seqs or --block-size."
        )
    num_spans = (num_bytes - fixed_bytes) // span_bytes if growing else 0
    return {name: count + num_spans * per_span.get(name, 0) for name, count in fixed.items()}


def _fixed_pages(group: GroupSpec, num_requests: int, num_step_tokens: int) -> int:
    """Pages that do not grow with the cached tokens: the null page, and each request's own."""
    size = group.tokens_per_page
    match group.sharing:
        case Paged(lookahead):
            own = num_requests * -(-lookahead // size)
        case Checkpoint():
            own = num_requests  # the running state of a request may open a page
        case Private():
            own = num_requests * group.pages_for_request(0)
        case Window(window):
            # A request with s rows in the step spans at most (kept + s - 1 + size - 2) // size + 1
            # pages; a sum of floors is at most the floor of the sum.
            kept = window + group.ring_tokens
            own = (num_requests * (kept + size - 2) + num_step_tokens - 1) // size + num_requests
    return 1 + own
