"""Mistakes picked by hand in cache ownership, scheduling, sampling and models.

In:  nothing. Out: `MISTAKES`, data only (see mistakes_attention.py).
"""

from __future__ import annotations

from tools.mutation.mutant import Mistake

CACHE = "src/gnomon/cache/"
ENGINE = "src/gnomon/engine/"
MODELS = "src/gnomon/models/"
ROUTING = "src/gnomon/attention/ops/routing.py"
PAGES = ("tests/unit/cache/test_pages.py",)
PREFIX = ("tests/unit/cache/test_prefix.py",)
SHARING = ("tests/unit/engine/test_scheduler_prefix.py",)
BATCH = ("tests/unit/engine/test_batch.py",)
ARITHMETIC = "tests/laws/bugs/test_bugs_h_arithmetic.py::"
LONG_PROMPT = (ARITHMETIC + "test_h11_no_layer_diverges_on_a_long_prompt",)

MISTAKES = (
    Mistake("freed-too-early", "released page too early", CACHE + "pages.py",
            "if self._in_flight:\n", "if len(self._in_flight) > 1:\n", PAGES),
    Mistake("head-evicted-first", "a chain evicted from its start", CACHE + "pages.py",
            "for span in reversed(spans):", "for span in spans:", PAGES),
    Mistake("no-salt", "prefix hash without salt", CACHE + "prefix.py",
            "head + salt.encode(\"utf-8\", \"surrogatepass\")", "head", PREFIX),
    Mistake("no-past", "prefix hash without the past", CACHE + "prefix.py",
            "body = parent + array(", "body = array(", PREFIX),
    Mistake("all-of-the-prompt", "off-by-one: no token left to compute",
            ENGINE + "schedule_pages.py",
            "(len(state.tokens) - 1) // pool.span_tokens", "len(state.tokens) // pool.span_tokens",
            SHARING),
    Mistake("shared-before-computed", "commit before the step has run",
            ENGINE + "schedule_pages.py",
            "num_full = state.num_computed // pool.span_tokens",
            "num_full = state.num_scheduled // pool.span_tokens", SHARING),
    Mistake("preempted-step", "an old step counts after preemption", ENGINE + "scheduler.py",
            "if state.num_preemptions == item.num_preemptions:",
            "if state.num_preemptions >= item.num_preemptions:",
            ("tests/unit/engine/test_scheduler_laws.py",)),
    Mistake("logit-row", "off-by-one row of the logits", ENGINE + "batch.py",
            "ends[sampled] - 1", "ends[sampled] - 2", BATCH),
    Mistake("stale-pages", "stale pages behind a shorter list", ENGINE + "batch.py",
            "self._pages[line, len(pages) : self._length[line]] = 0",
            "self._length[line] = len(pages)", BATCH),
    Mistake("noise-by-row", "noise by row instead of position", ENGINE + "sampler.py",
            "[row.position for row in rows]", "list(range(len(rows)))",
            ("tests/unit/engine/test_sampler.py",)),
    Mistake("noise-without-choice", "noise without the choice", ENGINE + "sampling_noise.py",
            "choices & MASK32, purpose", "purpose, purpose",
            ("tests/unit/engine/test_sampler_noise.py",)),
    Mistake("top-p-edge", "top-p keeps no token past its mass", ENGINE + "sampling_filters.py",
            "(mass < cut[:, None]).sum(-1)", "(mass < cut[:, None])[:, 1:].sum(-1)",
            ("tests/unit/engine/test_sampler.py",)),
    Mistake("index-rope", "wrong rope convention", MODELS + "rotation.py",
            "at(written, interleaved)\n", "at(written, not interleaved)\n",
            (ARITHMETIC + "test_h1_index_rope_of_both_styles",)),
    Mistake("router-bias", "router bias in the weights", ROUTING,
            "expert_weights(logits, ids, rule)", "expert_weights(logits + bias, ids, rule)",
            LONG_PROMPT),
    Mistake("context-merge", "later context chunks not merged", MODELS + "mla.py",
            "if is_begun[piece.row_start]:", "if piece.num_rows < 0:",
            ("tests/laws/test_motivating_faults_mixed.py",)),
    Mistake("visible-from-zero", "a chunk of context read as if from its start", MODELS + "mla.py",
            "(axis.kv_len[rows] - piece.key_start).clamp", "axis.kv_len[rows].clamp",
            ("tests/laws/test_motivating_faults_mixed.py",)),
    Mistake("yarn-unit", "wrong unit: pairs for columns", MODELS + "rotation.py",
            "torch.arange(dim // 2, dtype=torch.float32)",
            "torch.arange(0, dim, 2, dtype=torch.float32)", LONG_PROMPT),
)  # fmt: skip
