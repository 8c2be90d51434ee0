"""Mistakes picked by hand in the attention library: the kinds that public faults are made of.

In:  nothing. Out: `MISTAKES`, data only; a snippet occurs once in its file and is kept short, so
that it still fits when the code around it changes.
Not here: mistakes in cache, engine and models (mistakes_engine.py).
"""

from __future__ import annotations

from tools.mutation.mutant import Mistake

ATTENTION = "src/gnomon/attention/"
UNIT = "tests/unit/attention/"
GEOMETRY = (UNIT + "test_geometry.py",)
TRANSFORMS = (UNIT + "test_transforms.py",)
INDICES = (UNIT + "test_indices.py",)
SHARDING = (UNIT + "test_sharding.py",)
DRAFTS = (UNIT + "test_drafts.py",)
PLAN = (UNIT + "test_plan_places.py", UNIT + "test_plan.py")
AXES = (UNIT + "test_axes.py",)

MISTAKES = (
    Mistake("causal", "off-by-one causal length", ATTENTION + "geometry.py",
            "request, position, position + 1]", "request, position, position]", GEOMETRY),
    Mistake("slot-page-size", "slot computed with the wrong page size", ATTENTION + "geometry.py",
            "slot = page * self.page_size", "slot = page * num_pages", INDICES),
    Mistake("null-page", "null page taken for a page", ATTENTION + "geometry.py",
            "held &= (page > 0) & (column < num_pages)", "held &= column < num_pages", GEOMETRY),
    Mistake("neighbours-table", "page table row of the neighbour", ATTENTION + "geometry.py",
            "pages[request, np.where(", "pages[request - 1, np.where(", GEOMETRY),
    Mistake("first-token-writes", "an entry written by its first token", ATTENTION + "geometry.py",
            "torch.where((position + 1) % self", "torch.where(position % self",
            (*GEOMETRY, *DRAFTS)),
    Mistake("capacity-in-pages", "pages counted as tokens", ATTENTION + "geometry.py",
            "int(self.pages.shape[1]) * self.page_size *", "int(self.pages.shape[1]) *", GEOMETRY),
    Mistake("stride-forgotten", "strided rows taken for consecutive", ATTENTION + "axes.py",
            "(self.stop - self.start - 1) * self.stride", "(self.stop - self.start - 1)", PLAN),
    Mistake("padding-keeps-row", "padding rows keep a live row's values", ATTENTION + "axes.py",
            "taken.masked_fill_((source < 0).view(shape), fill)", "taken", AXES),
    Mistake("padding-sees-a-key", "padding row with kv_len 1", ATTENTION + "transforms.py",
            "kv_len=pad(axis.kv_len, 0)", "kv_len=pad(axis.kv_len, 1)", TRANSFORMS),
    Mistake("stale-writes", "stale companion array", ATTENTION + "transforms.py",
            "writes = _carry_writes(geometry.writes, axis, rows, source)\n    return",
            "writes = geometry.writes\n    return", TRANSFORMS),
    Mistake("stale-block", "blocks of ranks found by their new size", ATTENTION + "transforms.py",
            "[:, None] * block", "[:, None] * len(source)", TRANSFORMS),
    Mistake("stale-twin", "host twin keeps the rank's own request numbers",
            ATTENTION + "sharding.py",
            "request=span.request + offset", "request=span.request", (*AXES, *SHARDING)),
    Mistake("padding-shifted", "padding becomes the neighbour's row", ATTENTION + "sharding.py",
            "torch.where(axis.request >= 0, axis.request + offset, -1)", "axis.request + offset",
            SHARDING),
    Mistake("zigzag-late-block", "late zig-zag block of the wrong rank", ATTENTION + "sharding.py",
            "cuts[blocks - 1 - rank]", "cuts[size + rank]", SHARDING),
    Mistake("draft-kv-len", "stale companion: drafts keep kv_len", ATTENTION + "drafts.py",
            "kv_len=take_rows(axis.kv_len, index, 0) + shift",
            "kv_len=take_rows(axis.kv_len, index, 0)", DRAFTS),
    Mistake("rejected-kept", "off-by-one: one rejected draft kept", ATTENTION + "drafts.py",
            "axis.position < settled.kv_len[", "axis.position <= settled.kv_len[", DRAFTS),
    Mistake("rejected-counted", "kv_len counts rejected drafts", ATTENTION + "drafts.py",
            "first + accepted", "requests.kv_len", DRAFTS),
    Mistake("causal-list", "off-by-one causal length", ATTENTION + "indices.py",
            "ids.masked_fill(ids >= count", "ids.masked_fill(ids > count", INDICES),
    Mistake("owned-count", "stale companion: count of the whole list", ATTENTION + "indices.py",
            "ids=ids, count=is_owned.sum(1, dtype=torch.int32)", "ids=ids", INDICES),
    Mistake("row-as-request", "lookup along the wrong axis", ATTENTION + "indices.py",
            "axis.request[:, None], segment.ids",
            "torch.arange(axis.num_rows)[:, None], segment.ids", (*AXES, *INDICES)),
    Mistake("neighbours-slots", "page table row of the neighbour", ATTENTION + "indices.py",
            "(axis.request[:, None] * num_pages", "(axis.request.roll(1)[:, None] * num_pages",
            INDICES),
    Mistake("axes-by-length", "axes told apart by length alone", ATTENTION + "row_tensor.py",
            "if value.axis is not expected:",
            "if value.axis.num_rows != expected.num_rows:", (UNIT + "test_row_tensor.py",)),
    Mistake("restored-in-front", "rows put back in front", ATTENTION + "row_tensor.py",
            "out.index_copy_(0, subset.rows, value.data)",
            "out[: len(subset.rows)] = value.data", (UNIT + "test_row_tensor.py",)),
    Mistake("stripe-unit", "wrong unit: blocks for entries", ATTENTION + "ownership.py",
            "position // period * self.interleave + position", "position // period + position",
            (UNIT + "test_sequence.py",)),
    Mistake("route-by-query-len", "wrong length: query for context", ATTENTION + "routes.py",
            "kv_len > dims.index_topk", "query_len > dims.index_topk",
            (UNIT + "test_routes.py",)),
    Mistake("longest", "off-by-one index width", ATTENTION + "plan.py",
            "(span.last_position + 1 for", "(span.last_position for", PLAN),
    Mistake("unscored-row", "off-by-one: a row past top-k gets no scores",
            ATTENTION + "score_chunks.py",
            "(dims.index_topk - span.position)", "(dims.index_topk + 1 - span.position)", PLAN),
    Mistake("score-stride", "strided rows taken for consecutive", ATTENTION + "score_chunks.py",
            "(row - span.start) * span.stride + 1", "(row - span.start) + 1", PLAN),
    Mistake("chunk-start", "chunk forgets where it starts", ATTENTION + "context_chunks.py",
            "ContextGather(request, start, stop,", "ContextGather(request, 0, stop - start,", PLAN),
    Mistake("workspace-offset", "wrong place in the workspace", ATTENTION + "context_chunks.py",
            "stop, self._num_keys)\n            for", "stop, 0)\n            for", PLAN),
    Mistake("budget-unit", "wrong unit: floats for bytes", ATTENTION + "score_chunks.py",
            "budget.score_bytes // 4, page_size", "budget.score_bytes, page_size", PLAN),
)  # fmt: skip
