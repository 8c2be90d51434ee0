"""The conformance kit: sound kernels pass, wrong ones fail with the reason, the docs run.

The wrong kernels are those of tests/unit/checked/lies.py and some that only this kit can meet.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.attention.conformance import check_operator, describe_operator
from gnomon.attention.dispatch import OPERATORS
from gnomon.attention.spec import SPECS, Case, Scale
from gnomon.errors import ConfigError, NumericsError
from tests.unit.checked import lies
from tests.unit.checked.steps import TORCH

DOCS = Path(__file__).parents[3] / "docs" / "conformance.md"


@pytest.mark.parametrize("op", OPERATORS)
def test_our_kernels_conform_and_their_contracts_are_told(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        report = check_operator(op, TORCH[op], seed=2, dtype=dtype)
        assert report.is_ok, report
        report.raise_if_failed()
    text = describe_operator(op)
    for argument in SPECS[op].arguments:
        assert argument.name in text
    for rule in SPECS[op].constraints:
        assert rule in text


@pytest.mark.parametrize(
    ("op", "layout"),
    [
        ("sparse_mla", "fp8_ds_mla_656"),
        ("context_gather", "fp8_ds_mla_656"),
        ("index_scores_paged", "index_k_132"),
    ],
)
def test_packed_caches(op: str, layout: str) -> None:
    assert check_operator(op, TORCH[op], layout=layout).is_ok

    def of_plain_bytes(*arguments: Any) -> Any:
        return TORCH[op](*arguments[:-1], arguments[-1] * (1.01 if op != "context_gather" else 0))

    assert not check_operator(op, of_plain_bytes, layout=layout).is_ok


@pytest.mark.parametrize(
    ("op", "kernel", "problem"),
    [
        ("sparse_mla", lies.binary_lse, r"lse\[.*\] is off by"),
        ("sparse_mla", lies.extra_row, "wrong shape"),
        ("sparse_mla", lies.row_of_empty_memory, r"out\[5, .*NaN"),
        ("sparse_mla", lies.padding_not_zero, r"out\[.*off by 0.5"),
        ("rms_norm", lies.argument_changed, "argument 'x' was changed"),
        ("topk", lies.swapped_ids, r"ids\[4, "),
        ("latent_write", lies.padding_written, r"pool\[0, "),
        ("moe", lambda *_: 1 / 0, "raised ZeroDivisionError: division by zero"),
        ("moe", lambda *_: None, "out is missing"),
    ],
)
def test_a_wrong_kernel_fails_for_the_right_reason(op: str, kernel: Any, problem: str) -> None:
    report = check_operator(op, kernel, seed=2)
    assert not report.is_ok
    assert any(re.search(problem, case.problem) for case in report.failures), report
    with pytest.raises(NumericsError, match=problem):
        report.raise_if_failed()
    assert "FAILED" in str(report)


def test_given_memory_is_guarded() -> None:
    def right(*arguments: Any, out: Any = None) -> None:
        for place, value in zip(out, TORCH["sparse_mla"](*arguments), strict=True):
            place.copy_(value)

    def past_the_end(*arguments: Any, out: Any = None) -> None:
        right(*arguments, out=out)
        wide = out[1].as_strided((len(out[1]) + 1, 4), (4, 1), out[1].storage_offset())
        wide[-1] = 0.5

    def one_result(x: Any, weight: Any, eps: float, *, out: Any) -> Any:
        return out.copy_(TORCH["rms_norm"](x, weight, eps))

    assert check_operator("sparse_mla", right).is_ok
    assert check_operator("rms_norm", one_result).is_ok
    problems = [case.problem for case in check_operator("sparse_mla", past_the_end).failures]
    assert any("lse was written behind its last row" in problem for problem in problems)


def test_cases_of_ones_own_and_other_sizes() -> None:
    case = Case("mine", (torch.ones(2, 3), torch.ones(3), 1e-6))
    report = check_operator("rms_norm", TORCH["rms_norm"], cases=[case])
    assert [one.label for one in report.cases] == ["mine"]
    small = check_operator("sparse_mla", TORCH["sparse_mla"], scale=Scale(num_rows=7, num_keys=33))
    assert small.is_ok
    nothing = check_operator("rms_norm", TORCH["rms_norm"], cases=[])
    assert not nothing.is_ok
    with pytest.raises(NumericsError, match="no case was run"):
        nothing.raise_if_failed()
    first, second = (check_operator("moe", TORCH["moe"], seed=seed) for seed in (1, 1))
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"op": "flash_mla"}, "no operator is called 'flash_mla'; there are: .*sparse_mla"),
        ({"op": "moe", "dtype": torch.int8}, "moe is not specified in torch.int8; use one of"),
        ({"op": "moe", "layout": "fp8"}, "moe reads no cache, .*operators that do are: sparse_mla"),
        ({"op": "sparse_mla", "layout": "fp9"}, "fp9"),
    ],
)
def test_bad_wishes_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_operator(kernel=TORCH["moe"], **arguments)


def test_the_docs_do_what_they_say() -> None:
    """Every Python block runs, in order; the last line of every printed table is as shown."""
    text = DOCS.read_text(encoding="utf-8")
    printed = io.StringIO()
    names: dict[str, Any] = {}
    with redirect_stdout(printed):
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(block, str(DOCS), "exec"), names)
    shown = [
        block.strip().splitlines()[-1] for block in re.findall(r"```text\n(.*?)```", text, re.S)
    ]
    assert len(shown) == 2
    for line in shown:
        assert line in printed.getvalue().splitlines()
