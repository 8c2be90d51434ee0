"""The sampler's and the checks' kernels under the interpreter, against their plain forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gnomon.engine import sampling_edges_triton, sampling_triton, step_checks_triton
from gnomon.engine.sampling_draw import Cut, Wishes, choose, cut_of
from gnomon.engine.sampling_filters import Filters, last_kept
from gnomon.engine.step_checks import row_flags
from tests.unit.triton.ahead_of_time import Build, compile_all, faults

# Triton's interpreter turns blocks of one element into loop bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def wishes(num_rows: int) -> Wishes:
    """Greedy rows, free rows, and rows with each filter, with seeds and positions of every size."""
    rows = np.arange(num_rows)
    return Wishes(
        temperature=np.array([0.0, 1.0, 0.3, 2.0, 1e-4])[rows % 5],
        seed=(rows.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)),
        position=np.array([0, 5, 2**31 + 7, 2**32 - 1])[rows % 4],
        choice=rows % 3,
        top_k=np.array([0, 0, 7, -1])[rows % 4],
        top_p=np.array([1.0, 0.7, 1.0])[rows % 3],
        min_p=np.where(rows % 7 == 6, 0.05, 0.0),
    )


@pytest.mark.parametrize("num_tokens", [1, 3, 500, 1024, 4096, 5003])
@pytest.mark.parametrize("grain", [0.0, 0.5])
def test_kernels_choose_what_plain_operations_choose(num_tokens: int, grain: float) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(12, num_tokens + 5, generator=generator)[:, :num_tokens] * 2
    if grain:
        logits = (logits / grain).round() * grain
    logits[3, : num_tokens // 2] = -math.inf
    asked = wishes(12)
    cuts: list[tuple[Wishes | None, Cut | None]] = [(None, None)]
    cuts.append((asked, cut_of(logits, asked, last_kept)))
    for given, cut in cuts:
        expected = choose(logits, given)
        found = sampling_triton.race(logits, given, cut)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.greatest, expected.greatest)


FILTERS = {
    "top_k": [1, 2, 7, 40, 300, 900, 10**6],
    "top_p": [1.0, 0.999, 0.9, 0.5, 1e-6],
    "min_p": [0.0, 0.0, 1e-3, 0.3, 1.0],
    "temperature": [1.0, 0.3, 2.0, 0.01],
}


@pytest.mark.parametrize("num_tokens", [1, 3, 500])
@pytest.mark.parametrize(("spread", "grain"), [(0.0, 0.0), (0.2, 0.0), (3.0, 0.0), (3.0, 0.5)])
def test_edges_are_those_of_a_sorted_row(
    num_tokens: int, spread: float, grain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they lie among few leading tokens or beyond, with ties and without."""
    monkeypatch.setattr(sampling_edges_triton, "NUM_LEADING", 32)
    generator = np.random.default_rng(num_tokens)
    given = {name: generator.choice(values, size=9) for name, values in FILTERS.items()}
    given["top_k"] = np.minimum(given["top_k"], num_tokens)
    logits = torch.from_numpy(generator.standard_normal((9, num_tokens), dtype=np.float32))
    logits *= spread
    if grain:
        logits = (logits / grain).round() * grain
    logits[2, : num_tokens // 2] = -math.inf
    filters = Filters(**{name: torch.from_numpy(values) for name, values in given.items()})
    assert sampling_edges_triton.last_kept(logits, filters).tolist() == (
        last_kept(logits, filters).tolist()
    )


def test_edges_of_rows_without_a_maximum_are_tokens() -> None:
    logits = torch.randn(4, 1500)
    logits[0, 3], logits[1, 1400], logits[2] = math.inf, math.nan, -math.inf
    logits[3] = math.nan
    for top_p in (1.0, 0.9):
        floats = torch.tensor([[1.0] * 4, [top_p] * 4, [0.0] * 4], dtype=torch.float64)
        filters = Filters(floats[0], torch.tensor([1500, 5, 1500, 1200]), floats[1], floats[2])
        last = sampling_edges_triton.last_kept(logits, filters)
        assert bool(((last >= 0) & (last < 1500)).all())


@pytest.mark.parametrize("is_drawn", [False, True])
def test_rows_that_hold_no_maximum_say_so_and_name_a_token(is_drawn: bool) -> None:
    logits = torch.randn(5, 4100)
    logits[1, 4099] = math.nan
    logits[2, 7] = math.inf
    logits[3] = -math.inf
    logits[4] = math.nan
    found = sampling_triton.race(logits, wishes(5) if is_drawn else None, None)
    assert [str(value) for value in found.greatest[1:].tolist()] == ["nan", "inf", "-inf", "nan"]
    assert bool(((found.token_ids >= 0) & (found.token_ids < 4100)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 100, 4097])
def test_flags_of_rows(dtype: torch.dtype, width: int) -> None:
    hidden = torch.randn(6, width).to(dtype)
    hidden[1, width - 1] = math.nan
    hidden[2, 0] = -math.inf
    hidden[4] = torch.finfo(dtype).max
    nan_rows = torch.tensor([False, False, True, True, False, False])
    found = step_checks_triton.row_flags(hidden, nan_rows)
    assert torch.equal(found, row_flags(hidden, nan_rows))
    assert found[0].tolist() == [False, True, True, False, False, False]


def test_kernels_compile_for_gpus() -> None:
    kinds = {
        "logits": "*fp32", "keys": "*i64", "temperatures": "*fp64", "cut_logit": "*fp32",
        "cut_id": "*i64", "best_score": "*fp64", "best_id": "*i32", "greatest": "*fp32",
        "token_ids": "*i64", "maxima": "*fp64", "hidden": "*bf16", "nan_rows": "*i1", "out": "*i1",
        "largest": "*fp32", "min_ps": "*fp64", "mass": "*fp64", "leading": "*i32",
        "top_ks": "*i64", "top_ps": "*fp64", "last": "*i64", "is_settled": "*i1",
        "stride": "i32", "V": "i32", "num_rows": "i32", "num_blocks": "i32",
    }  # fmt: skip

    def build(module: str, kernel: object, arch: int, **given: object) -> Build:
        options = {"num_warps": given.pop("num_warps", 4)}
        names = list(kernel.arg_names)
        signature = {name: "constexpr" if name in given else kinds[name] for name in names}
        return Build(f"gnomon.engine.{module}", kernel.__name__, signature, given, options, arch)

    race, checks, edges = sampling_triton, step_checks_triton, sampling_edges_triton
    unused = {name: None for name in ("keys", "temperatures", "cut_logit", "cut_id")}
    reports = compile_all(
        [
            build("sampling_triton", race.block_best_kernel, arch, IS_DRAWN=True, HAS_CUT=True,
                  BLOCK=race.DRAWN_BLOCK)
            for arch in (80, 90)
        ]
        + [
            build("sampling_triton", race.block_best_kernel, 90, IS_DRAWN=False, HAS_CUT=False,
                  BLOCK=race.GREEDY_BLOCK, **unused),
            build("sampling_triton", race.row_best_kernel, 90, BLOCKS=128),
            build("sampling_edges_triton", edges.block_mass_kernel, 90, BLOCK=edges.MASS_BLOCK),
            build("sampling_edges_triton", edges.leading_edge_kernel, 90, K=edges.NUM_LEADING,
                  BLOCKS=128),
            build("sampling_edges_triton", edges.whole_edge_kernel, 90, BLOCK=edges.ROW_BLOCK,
                  num_warps=16),
            build("step_checks_triton", checks.row_flags_kernel, 90, D=7168, BLOCK=4096),
        ]
    )  # fmt: skip
    assert faults(reports) == []
