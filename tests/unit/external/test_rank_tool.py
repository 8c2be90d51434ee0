"""The tool that makes a ranking table out of a results file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.rank_providers import main

FP8 = '"sparse_mla", "decode", "fp8_ds_mla_656", 16'
BF16 = '"sparse_mla", "prefill", "bf16_576", 128'


def cell(op: str, size: str, **times: float | None) -> dict[str, Any]:
    entries = [
        {"provider": name, "timing": None if us is None else {"median_us": us}}
        for name, us in times.items()
    ]
    return {"op": op, "size": size, "times": entries}


def test_cells_become_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        cell("sparse_mla", "decode b1 h16, fp8", triton=5.0, flashmla=8.0, fa3=None),
        cell("sparse_mla", "decode b64 h16, fp8", triton=7.0, flashmla=6.0),
        cell("sparse_mla", "prefill 4096 rows h128, 32k keys, bf16", triton=9.0, flashmla=4.0),
        cell("index_scores_paged", "b64, 32k keys, H64", triton=2.0, deepgemm=1.0),
        cell("rms_norm", "16k x 7168", triton=1.0, torch=2.0),
        cell("topk", "64 x 128k", triton=1.0),
    ]
    path = tmp_path / "ops.json"
    path.write_text(json.dumps({"cells": cells}))
    assert main([str(path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    found = [line.removeprefix("Measured(").removesuffix("),") for line in lines]
    assert found == [
        '"index_scores_paged", "decode", "index_k_132", 64, ("deepgemm", "triton"), _H200',
        '"index_scores_paged", "prefill", "index_k_132", 64, ("deepgemm", "triton"), _H200',
        '"rms_norm", "decode", None, 1, ("triton", "torch"), _H200',
        '"rms_norm", "prefill", None, 1, ("triton", "torch"), _H200',
        f'{FP8}, ("triton", "flashmla"), _H200, num_rows=1',
        f'{FP8}, ("flashmla", "triton"), _H200, num_rows=64',
        f'{BF16}, ("flashmla", "triton"), _H200, num_rows=4096',
    ]
    assert main([]) == 2
