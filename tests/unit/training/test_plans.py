"""Plans: where sparse and dense attention alternate, and that a training run does as its plan says.

Oracle: counting, and a watch over what each step of a small run is told to attend.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training import checkpoint
from training.parameters import initial_parameters
from training.plans import PLANS, Plan, Stage
from training.selection import Choice
from training.train import Training, arguments

BIG = ("tiny", "polish", "finish", "glm", "glm_finish")


@pytest.mark.parametrize("name", BIG)
def test_half_of_the_last_stage_is_dense_at_every_length_alike(name: str) -> None:
    stage = PLANS[name].stages[-1]
    rounds = stage.steps // len(stage.lengths)
    seen: Counter[tuple[int, bool]] = Counter(
        (stage.lengths[step % len(stage.lengths)], stage.is_sparse_at(step))
        for step in range(rounds * len(stage.lengths))
    )
    for length in stage.lengths:
        dense, sparse = seen[length, False], seen[length, True]
        assert abs(dense / (dense + sparse) - 1 / 2) < 0.01
    assert stage.is_sparse_at(0)
    assert stage.is_sparse_at(stage.steps - 1), "the last steps are of the kind that is served"


def test_a_new_model_begins_densely_a_trained_one_goes_on_as_it_ends() -> None:
    *dense, last, _ = PLANS["tiny"].stages
    assert last.dense_every == 3
    assert not any(stage.is_sparse_at(step) for stage in dense for step in range(stage.steps))
    for name in BIG[1:]:
        (only,) = PLANS[name].stages
        assert only.lengths == PLANS["tiny"].stages[-1].lengths
        assert only.dense_every == 2
        assert PLANS[name].matrix_rate < PLANS["tiny"].matrix_rate / 2, "nothing is unlearnt"


@pytest.mark.parametrize("name", BIG)
def test_texts_grow_and_the_rate_falls_to_nothing(name: str) -> None:
    plan = PLANS[name]
    last = plan.stages[-1]
    longest = [max(stage.lengths) for stage in plan.stages]
    assert longest == sorted(longest)
    assert max(last.lengths) == 8192
    assert all(plan.tokens % length == 0 for stage in plan.stages for length in stage.lengths)
    assert plan.factor(plan.num_steps - 1) <= 0.02


def test_without_dense_rounds_a_stage_is_of_one_kind() -> None:
    for is_sparse in (False, True):
        stage = Stage("one", 9, (64, 32), is_sparse)
        assert {stage.is_sparse_at(step) for step in range(9)} == {is_sparse}


@pytest.mark.parametrize(("shape", "family"), [("tenth", "dsv32"), ("tiny_glm", "glm")])
def test_a_run_attends_as_its_plan_says_and_measures_at_its_end(
    shape: str, family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = Stage("mixed", 5, (64, 96), is_sparse=True, dense_every=2)
    plan = Plan(shape, 192, (Stage("dense", 1, (64,)), mixed), family=family)
    monkeypatch.setitem(PLANS, "small", plan)
    monkeypatch.setattr(
        "sys.argv",
        ["train", "--plan", "small", "--out", str(tmp_path), "--count", "2", "--report", "4"],
    )
    training = Training(plan, arguments())
    asked: list[tuple[int, Choice | None]] = []
    start = training.model.start

    def watched(ids: Tensor, choice: Choice | None, picked: Tensor | None = None) -> Any:
        asked.append((ids.shape[1], choice))
        return start(ids, choice, picked)

    monkeypatch.setattr(training.model, "start", watched)
    before = {name: value.detach().clone() for name, value in training.params.items()}
    training.run()
    both, none = Choice.EXACT, None
    assert asked == [(64, none), (64, both), (96, both), (64, none), (96, none), (64, both)]
    moved = [not torch.equal(value, before[name]) for name, value in training.params.items()]
    assert all(moved), "a parameter that no step reaches is not trained"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 6]
    assert "needle 96" in lines[-1]
    again = initial_parameters(training.shape, 9, "cpu")
    assert checkpoint.load(tmp_path, again, None)["step"] == 6
    assert all(torch.equal(value, again[name]) for name, value in training.params.items())
