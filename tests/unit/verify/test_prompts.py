"""Prompts: seams first, all lengths in range, the same for the same seed."""

from __future__ import annotations

import pytest

from gnomon.verify.prompts import PromptRule, draw_prompts

RULE = PromptRule(vocab_size=97, index_topk=16, page_size=16, longest=600)


def test_the_seams_come_first() -> None:
    lengths = [len(prompt) for prompt in draw_prompts(RULE, 20, 0, "x")]
    assert {1, 2, 8, 15, 16, 17, 18, 32, 128, 129, 600} <= set(lengths)


def test_few_prompts_still_cross_the_edge_of_selection() -> None:
    lengths = [len(prompt) for prompt in draw_prompts(RULE, 3, 0, "x")]
    assert min(lengths) <= 16 < max(lengths)


@pytest.mark.parametrize("longest", [1, 5, 16, 40])
def test_lengths_and_ids_are_in_range(longest: int) -> None:
    rule = PromptRule(vocab_size=97, index_topk=16, page_size=16, longest=longest)
    prompts = draw_prompts(rule, 50, 3, "x")
    assert len(prompts) == 50
    assert all(1 <= len(prompt) <= longest for prompt in prompts)
    assert all(0 <= token < 97 for prompt in prompts for token in prompt)


def test_the_same_seed_and_purpose_give_the_same() -> None:
    assert draw_prompts(RULE, 30, 7, "a") == draw_prompts(RULE, 30, 7, "a")
    assert draw_prompts(RULE, 30, 7, "a") != draw_prompts(RULE, 30, 7, "b")
    assert draw_prompts(RULE, 30, 7, "a") != draw_prompts(RULE, 30, 8, "a")


def test_long_and_short_ones_both_occur() -> None:
    lengths = sorted(len(prompt) for prompt in draw_prompts(RULE, 300, 0, "x"))
    assert lengths[75] < 60
    assert lengths[-75] > 250
