"""Two arms over the same prompts, by the command: equal where they have to be, and a fault is seen.

Faults are seeded in one arm's way only: ranks that read another's keys, a cache format that is read
back a little too large, prompts whose chunks lose a token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor
from typer.testing import CliRunner

from gnomon.attention.layouts import Fp8LatentLayout
from gnomon.cli.main import build_app
from gnomon.errors import ConfigError
from gnomon.parallel.simulated import SimulatedRank

SMALL = ("--prompts", "4", "--max-tokens", "6", "--max-length", "60")


def compare(model: str, *arms: str, more: tuple[str, ...] = ()) -> Result:
    flags = [word for arm in arms for word in ("--arm", arm)]
    return CliRunner().invoke(build_app(), ["verify", f"random:{model}", *flags, *SMALL, *more])


@pytest.mark.parametrize(
    ("model", "arms"),
    [
        ("deepseek_v32,layers=3", ("cp=4", "cp=1")),
        ("glm_moe_dsa,layers=5", ("cp=1", "cp=3,cp_strategy=zigzag,max_prefill_chunk=7")),
        ("deepseek_v32,layers=3", ("max_prefill_chunk=5", "dense_route=never,rows=16")),
        ("deepseek_v32,layers=3", ("kv_layout=fp8", "kv_layout=fp8,cp=2")),
    ],
)
def test_arms_of_one_precision_are_equal(model: str, arms: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = compare(model, *arms, more=("--json", str(file)))
    assert result.exit_code == 0, result.output
    values = json.loads(file.read_text())
    assert values["tolerance"] == 3e-5
    assert values["sides"] == list(arms)
    assert len(values["prompts"]) == 4
    assert {prompt["outcome"] for prompt in values["prompts"]} <= {"equal", "tie"}
    assert all(prompt["worst"] <= 3e-5 for prompt in values["prompts"])


def test_two_layouts_are_within_their_precision() -> None:
    result = compare("deepseek_v32,layers=3", "kv_layout=bf16_576", "kv_layout=fp8_ds_mla_656")
    assert result.exit_code == 0, result.output
    assert "random weights drawn wider for the cache layout: kv_lora_rank = 512" in result.output
    assert "the second arm has the first one's tokens and choices" in result.output


def test_a_finer_tolerance_is_not_reached() -> None:
    more = ("--tolerance", "0.001")
    result = compare("deepseek_v32,layers=3", "", "kv_layout=fp8", more=more)
    assert result.exit_code == 1
    assert "FAILED: prompt 0: logits off by" in result.output


@pytest.mark.parametrize(("given", "limit", "code"), [((), 0.06, 0), (("1e-9",), 1e-9, 1)])
def test_what_16_bits_may_differ_by_is_what_is_told(
    given: tuple[str, ...], limit: float, code: int, tmp_path: Path
) -> None:
    """Guards: an accepted --tolerance is honoured, and the bound shown is the bound applied."""
    file = tmp_path / "report.json"
    more = ("--dtype", "bfloat16", "--json", str(file), *(("--tolerance", *given) if given else ()))
    result = compare("deepseek_v32,layers=2", "max_prefill_chunk=7", "", more=more)
    assert result.exit_code == code, result.output
    assert json.loads(file.read_text())["tolerance"] == limit


@pytest.mark.parametrize("arms", [("fp8", "dequantise"), ("dequantise", "fp8")])
def test_products_of_8_bits_are_another_precision_in_either_order(
    arms: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    words = [f"weights={kind}" for kind in arms]
    result = compare("deepseek_v32,layers=2,fp8=true", *words, more=("--json", str(file)))
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["tolerance"] == 0.28
    assert "the second arm has the first one's tokens and choices" in result.output


def test_ranks_that_gather_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = SimulatedRank.all_gather

    def broken(self: SimulatedRank, value: Tensor) -> Tensor:
        return torch.cat(list(reversed(gather(self, value).chunk(self.size))))

    monkeypatch.setattr(SimulatedRank, "all_gather", broken)
    result = compare("deepseek_v32,layers=3", "cp=1", "cp=2")
    assert result.exit_code == 1
    assert "FAILED: prompt 0: " in result.output


def test_one_rank_that_holds_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache that rounds, what all ranks wrote is compared among them."""
    gather = SimulatedRank.all_gather

    def broken(self: SimulatedRank, value: Tensor) -> Tensor:
        return gather(self, value) * (1.0 if self.rank == 0 else 1.2)

    monkeypatch.setattr(SimulatedRank, "all_gather", broken)
    result = compare("deepseek_v32,layers=3", "kv_layout=fp8", "kv_layout=fp8,cp=2")
    assert "rank 1 and an earlier one hold different" in str(result.exception)


def test_a_layout_that_is_read_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is off by an eighth in one group."""
    read = Fp8LatentLayout.dequantise

    def broken(self: Fp8LatentLayout, rows: Tensor) -> Tensor:
        values = read(self, rows).clone()
        values[..., : self.group_width] *= 2.0
        return values

    monkeypatch.setattr(Fp8LatentLayout, "dequantise", broken)
    result = compare("deepseek_v32,layers=3", "kv_layout=bf16_576", "kv_layout=fp8_ds_mla_656")
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (("cp=2",), "--arm is given 1 times"),
        (("cp=2", "cp=1", ""), "--arm is given 3 times"),
        (("cp=2", "kv_layut=fp8"), "Did you mean 'kv_layout'"),
        (("kv_layout=fp8_ds_mla_657", ""), "'fp8_ds_mla_657' is not available"),
    ],
)
def test_wrong_arms_are_refused_before_anything_is_loaded(
    arms: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any, **more: Any) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("gnomon.verify.weights.Weights.open", load)
    result = compare("deepseek_v32,layers=2", *arms)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
