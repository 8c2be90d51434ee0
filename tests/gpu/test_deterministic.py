"""Deterministic runs on a GPU: a request's logits are the same bits in any company and any chunks.

No tolerance: torch.equal. Both families in bf16, with FP8 weights and latents and without, one
model of real widths, one in fp32. The first engine replays graphs, those of chunks run
eagerly. One test a model, as the expected logits are dear; half a minute each with a cold cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.attention.providers.triton.fixed import linear, multiply_heads
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import EngineRequest
from tests.engine.tiny_engine import outputs, prompt, request
from tests.gpu.test_engine import GLM, LENGTHS, V32, core_on

pytestmark = pytest.mark.gpu

WIDE = (
    "random:deepseek_v32,layers=2,hidden=1024,heads=16,topk=544,max_len=4096,kv_rank=512,"
    "rope_dim=64,nope_dim=128,v_dim=128,index_heads=64,index_dim=128,vocab=4096"
)
NUM_NEW = 6
TARGETS = (0, 1, 3, 5)  # prompts of 3, 40, 65 and 130 tokens; 16 or 32 keys are chosen
LONG = 560  # beside it, lists of the wide model are cut into splits; alone, the others' are not
Rows = dict[tuple[str, int], Tensor]  # (request, position of the next token) -> logits


@dataclass(frozen=True)
class Subject:
    """A model and what it runs in."""

    model: str
    dtype: str = "bfloat16"
    kv_layout: str = "auto"
    second: int = LENGTHS[1]  # tokens of prompt 1
    chunks: tuple[int, ...] = (1, 7, 64)
    crowds: tuple[int, ...] = (8, 64)

    def core(self, **flags: Any) -> EngineCore:
        """A deterministic engine of 64 seats."""
        own = {"model": self.model, "dtype": self.dtype, "kv_layout": self.kv_layout}
        fixed = {"deterministic": True, "max_num_seqs": 64, "enable_prefix_caching": False}
        return core_on("cuda", **{**own, **fixed, **flags})

    def asked(self, number: int, prefix: str = "r") -> EngineRequest:
        """Request ``number``; the same prompt whatever its name."""
        length = LENGTHS[number % len(LENGTHS)] + number // len(LENGTHS)
        length = self.second if number == 1 else length
        return request(f"{prefix}{number}", prompt(length, number), NUM_NEW)


SUBJECTS = {
    "v32": Subject(V32),
    "v32 fp8": Subject(f"{V32},fp8=true", kv_layout="fp8"),
    "glm": Subject(GLM),
    "glm fp8": Subject(f"{GLM},fp8=true", kv_layout="fp8"),
    "wide fp8": Subject(
        f"{WIDE},fp8=true", kv_layout="fp8", second=LONG, chunks=(100,), crowds=(64,)
    ),
    "v32 fp32": Subject(V32, "float32"),
}


def logits_of(core: EngineCore, asked: Sequence[EngineRequest]) -> Rows:
    """Logits of every row that a token was sampled from, graphs replayed where there are any."""
    kept: Rows = {}
    runner = core._parts.runner
    run = type(runner).run

    def keeping(batch: Any, *arguments: Any, **keywords: Any) -> Any:
        output = run(runner, batch, *arguments, **keywords)
        for row, logits in zip(batch.samples, output.logits.clone(), strict=True):
            kept[row.request.request_id, row.position] = logits
        return output

    runner.run = keeping
    try:
        outputs(core, asked)
    finally:
        del runner.run
    return kept


def differences(found: Rows, expected: Rows) -> list[str]:
    """Where bits differ, and by how much; "missing" where there is nothing to compare."""
    lines = []
    for name, row in expected.items():
        other = found.get(name)
        if other is None:
            lines.append(f"{name} missing")
        elif not torch.equal(other, row):
            lines.append(f"{name}: {float((other - row).abs().max()):.2e}")
    return lines


def alone(subject: Subject, core: EngineCore) -> Rows:
    """Logits of the targets, one after another in the same engine."""
    rows: Rows = {}
    for number in TARGETS:
        found = logits_of(core, [subject.asked(number)])
        first = min(position for _, position in found)  # a step may have run ahead of the last
        rows |= {key: row for key, row in found.items() if key[1] < first + NUM_NEW}
    return rows


def after_a_hit(subject: Subject, number: int) -> Rows:
    """Logits of a request whose prompt's pages the cache has."""
    core = subject.core(enable_prefix_caching=True, enforce_eager=True)
    logits_of(core, [subject.asked(number)])
    again = logits_of(core, [subject.asked(number, "again"), subject.asked(2)])
    return {(f"r{number}", at): row for (name, at), row in again.items() if name[0] == "a"}


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_the_bits_of_a_request_are_its_own(name: str) -> None:
    subject = SUBJECTS[name]
    core = subject.core()
    expected = alone(subject, core)
    assert len(expected) == len(TARGETS) * NUM_NEW
    assert all(bool(row.isfinite().all()) for row in expected.values())
    wrong = {}
    for num_rows in subject.crowds:
        found = logits_of(core, [subject.asked(number) for number in range(num_rows)])
        wrong[f"with {num_rows - 1} mates"] = differences(found, expected)
    for chunk in subject.chunks:
        eager = subject.core(max_prefill_chunk=chunk, enforce_eager=True)
        found = logits_of(eager, [subject.asked(number) for number in TARGETS])
        wrong[f"in chunks of {chunk}, eager"] = differences(found, expected)
    last = TARGETS[-1]
    own = {key: row for key, row in expected.items() if key[0] == f"r{last}"}
    wrong["after a prefix hit"] = differences(after_a_hit(subject, last), own)
    assert {arm: lines[:3] for arm, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize(
    ("columns", "depth"), [(128, 7168), (768, 7168), (2112, 7168), (9999, 999)]
)
def test_rows_of_a_product(columns: int, depth: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
    whole, wide = linear(x, weight), linear(x, weight, torch.float32)
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert float(((wide - expected).abs() / size).max()) < 1e-5
    assert torch.equal(wide.bfloat16(), whole)
    for start, stop in ((0, 1), (299, 300), (5, 7), (60, 77), (100, 164), (1, 300)):
        assert torch.equal(linear(x[start:stop], weight), whole[start:stop]), (start, stop)


def test_rows_of_heads() -> None:
    torch.manual_seed(1)
    up = torch.randn(128, 128 + 128, 512, device="cuda", dtype=torch.bfloat16) * 0.05
    query = torch.randn(300, 128, 192, device="cuda", dtype=torch.bfloat16)[..., :128]
    absorbed = multiply_heads(query, up[:, :128])
    values = multiply_heads(absorbed, up[:, 128:].transpose(1, 2))
    torch.testing.assert_close(absorbed, torch.einsum("mhk,hkn->mhn", query, up[:, :128]))
    for start, stop in ((0, 1), (299, 300), (60, 77), (1, 300)):
        part = multiply_heads(query[start:stop], up[:, :128])
        assert torch.equal(part, absorbed[start:stop]), (start, stop)
        part = multiply_heads(part, up[:, 128:].transpose(1, 2))
        assert torch.equal(part, values[start:stop]), (start, stop)
