"""Break the engine in one place at a time: the law that guards the place has to fail.

Each fault is silent: nothing raises, the text stays fluent, only the answer is another one. The law
must see it by what it compares (the failure names tokens, logits or choices), or by what it demands
(pages from the cache, rows on the dense route).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gnomon.attention.dispatch import KernelSet
from gnomon.attention.layouts import PagedPool
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.ops import select
from gnomon.attention.providers import builtin_providers
from gnomon.engine import assembly, request, sampling_draw, step_rules
from gnomon.engine.request import RequestState
from gnomon.engine.runner import Runner
from gnomon.engine.schedule_running import RunningSet
from gnomon.models.feed_forward import MixtureOfExperts
from gnomon.models.mla import LatentAttention
from gnomon.text.detokenize import Detokenizer
from gnomon.verify.context import Context, Handicap
from gnomon.verify.laws import choose_laws
from gnomon.verify.laws import transformers as transformers_laws
from gnomon.verify.result import Verdict
from gnomon.verify.run import run_law
from gnomon.verify.settings import VerifySettings

MODEL = "random:deepseek_v32,layers=3"
Break = Callable[[pytest.MonkeyPatch], object]


def neighbours_logits(patch: pytest.MonkeyPatch) -> None:
    """The last rows of a step get each other's logits."""
    compute = Runner.logits
    patch.setattr(Runner, "logits", lambda self, hidden: compute(self, hidden).roll(1, 0))


def last_row_is_not_written(patch: pytest.MonkeyPatch) -> None:
    """A chunk's last token leaves nothing in the cache."""
    write = PlainLayout.write

    def broken(self: PlainLayout, pool: PagedPool, slots: Tensor, values: Tensor) -> None:
        live = (slots >= 0).nonzero()[:, 0]
        slots = slots.clone()
        slots[live[1:][-1:]] = -1
        write(self, pool, slots, values)

    patch.setattr(PlainLayout, "write", broken)


def padding_leaks(patch: pytest.MonkeyPatch) -> None:
    """Padding rows add to the experts' sum."""
    compute = MixtureOfExperts.__call__

    def broken(self: MixtureOfExperts, x: Tensor, step: Any) -> Tensor:
        rows = step.geometry.rows
        return compute(self, x, step) + 1e-3 * (rows.num_rows - rows.num_live)

    patch.setattr(MixtureOfExperts, "__call__", broken)


def earlier_chunks_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Of the keys of earlier score chunks only the first K + 1 are kept, not the best."""

    def broken(kernels: Any, best: Any, count: Tensor, k: int) -> tuple[Any, Tensor]:
        kept = select._Best(best.scores[:, : k + 1], best.positions[:, : k + 1])
        return kept, torch.zeros_like(count, dtype=torch.bool)

    patch.setattr(select, "_keep_best", broken)


def pages_match_without_their_last_token(patch: pytest.MonkeyPatch) -> None:
    digest = request.next_digest
    patch.setattr(request, "next_digest", lambda parent, tokens: digest(parent, tokens[:-1]))


def prefixes_are_never_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "may_share", property(lambda self: False))


def who_is_pushed_out_loses_a_token(patch: pytest.MonkeyPatch) -> None:
    """The first token of a preempted request is another one when it is computed again."""
    push_out = RunningSet._push_out

    def broken(self: RunningSet, victim: RequestState) -> None:
        push_out(self, victim)
        victim.tokens[0] = (victim.tokens[0] + 1) % 512

    patch.setattr(RunningSet, "_push_out", broken)


def noise_hangs_on_the_row(patch: pytest.MonkeyPatch) -> None:
    draw = sampling_draw.gumbels

    def broken(seed: Any, position: Any, choice: Any, num_tokens: int) -> Any:
        return draw(seed + np.arange(len(seed), dtype=np.uint64), position, choice, num_tokens)

    patch.setattr(sampling_draw, "gumbels", broken)


def noise_is_the_same_for_all_choices(patch: pytest.MonkeyPatch) -> None:
    draw = sampling_draw.gumbels
    patch.setattr(
        sampling_draw,
        "gumbels",
        lambda seed, position, choice, num: draw(seed, position, 0 * choice, num),
    )


def dense_values_are_off(patch: pytest.MonkeyPatch) -> None:
    expand = LatentAttention._expand

    def broken(self: LatentAttention, chunk: Any, step: Any) -> tuple[Tensor, Tensor]:
        key, value = expand(self, chunk, step)
        return key, value * 1.001

    patch.setattr(LatentAttention, "_expand", broken)


def a_norm_is_off(patch: pytest.MonkeyPatch) -> None:
    (torch_provider,) = (one for one in builtin_providers() if one.name == "torch")
    kernels = {op: torch_provider.kernel(op) for op in ("rms_norm", "rope")}
    lying = KernelSet("lying", -1, {"rms_norm": lambda *a: kernels["rms_norm"](*a) * 1.001})
    patch.setattr(assembly, "builtin_providers", lambda: (*builtin_providers(), lying))


def halves_are_truncated(patch: pytest.MonkeyPatch) -> None:
    """Rounding towards zero, as some converters do."""
    quantise = PlainLayout.quantise

    def broken(self: PlainLayout, values: Tensor) -> Tensor:
        if self.dtype == torch.bfloat16:
            bits = values.float().contiguous().view(torch.int32) & ~0xFFFF
            values = bits.view(torch.float32)
        return quantise(self, values)

    patch.setattr(PlainLayout, "quantise", broken)


def characters_are_not_held_back(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Detokenizer, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    patch.setattr(Detokenizer, "feed", broken)


FAULTS: dict[str, Break] = {
    "company": neighbours_logits,
    "chunks": last_row_is_not_written,
    "padding": padding_leaks,
    "pieces": earlier_chunks_are_forgotten,
    "prefixes": pages_match_without_their_last_token,
    "preemption": who_is_pushed_out_loses_a_token,
    "priority": who_is_pushed_out_loses_a_token,
    "sampling": noise_hangs_on_the_row,
    "choices": noise_is_the_same_for_all_choices,
    "routes": dense_values_are_off,
    "full_width": dense_values_are_off,
    "reference": a_norm_is_off,
    "operators": a_norm_is_off,
    "layouts": halves_are_truncated,
    "text": characters_are_not_held_back,
}
SEEN = {
    "choices": "not all different",
    "operators": "rms_norm of provider lying",
    "layouts": "bf16",
    "text": "in portions of",
}


def failures(law_name: str, handicap: Handicap | None = None) -> tuple[str, ...]:
    settings = VerifySettings.of(model=MODEL, prompts=1, max_tokens=18, max_length=90)
    (law,) = choose_laws(law_name)
    result = run_law(law, Context(settings, handicap=handicap))
    assert result.verdict is Verdict.FAIL
    return result.failures


@pytest.mark.parametrize("law", FAULTS)
def test_broken(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[law](monkeypatch)
    assert SEEN.get(law, " differ") in failures(law)[0]


def test_prefixes_that_are_never_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes_are_never_found(monkeypatch)
    assert "0 tokens came from the cache" in failures("prefixes")[0]


def test_no_row_on_the_dense_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rules, "DensePolicy", lambda way: "never")
    assert "no row took the dense route" in failures("routes")[0]


def test_a_width_that_does_not_matter() -> None:
    """With K beyond every prompt the model's own K cannot be told from it."""
    assert (
        "rows of more than K keys moved by"
        in failures("own_width", Handicap({"index_topk": 4000}))[0]
    )


def test_nobody_is_pushed_out() -> None:
    """A law that was not put to the test does not pass."""
    settings = VerifySettings.of(model=MODEL, prompts=1, max_tokens=1, max_length=20)
    (law,) = choose_laws("priority")
    result = run_law(law, Context(settings))
    assert result.verdict is Verdict.FAIL
    assert "nobody was preempted" in result.failures[0]


def test_bfloat16_sees_a_wrong_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_laws, "LATENT_EPS", 1e-6)
    assert (
        "largest difference"
        in failures("transformers_bfloat16", Handicap({"routed_scaling_factor": 2.0}))[0]
    )
