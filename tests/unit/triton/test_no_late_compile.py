"""After the warm-up no step of an engine meets a kernel that would have to be compiled.

An engine as it is bound for an H200 with Triton alone, at published attention widths, over tensors
on a CPU: kernels do nothing, and each launch leaves the key that Triton compiles by
(launch_keys.py). Steps: random prompts, chunks behind contexts, decode beside them and alone, which
runs eagerly as it does where somebody listens or checks. Sampling: test_no_late_sampling.py.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from gnomon.attention.providers.triton import PROVIDER
from gnomon.engine import assembly, step_rules
from gnomon.engine.assembly import Parts, put_together, survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.machine import GIB, known_gpu
from gnomon.engine.memory_plan import GPU_BUDGET
from gnomon.engine.warm_up import _batch, warm_up
from gnomon.engine.warm_up_shapes import Work
from gnomon.models.sources import open_model
from tests.engine.static_kernels import StaticRecorder
from tests.unit.triton.launch_keys import watching

WIDTHS = (
    "layers=2,hidden=256,heads=16,topk=2048,max_len=16384,kv_rank=512,rope_dim=64,nope_dim=128,"
    "v_dim=128,q_rank=1536,index_heads=32,index_dim=128,vocab=512,intermediate_size=256,"
    "moe_intermediate_size=128,experts=8,n_group=1,topk_group=1,first_k_dense_replace=1,fp8=true"
)
MODELS = {"deepseek_v32": "fp8", "glm_moe_dsa": "auto"}  # by layout of the latents
NUM_PAGES, PAGE = 400, 64
NUM_STEPS = 40


@pytest.fixture
def as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """What host code asks of a device, answered as an H200 does."""
    machine = replace(known_gpu("h200"), free_bytes=130 * GIB, capability=(9, 0))
    answers = {
        "count_processors": lambda device: 132,
        "num_processors": lambda device: 132,
        "can_launch_early": lambda device: True,
        "has_native_fp8": lambda device: True,
        "_capability": lambda device: (9, 0),
        "probe_machine": lambda device: machine,
        "builtin_providers": lambda: (PROVIDER,),
        "external_providers": lambda path: (),
    }
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith("gnomon."):
            for name in answers.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, answers[name])
    rules = step_rules.batch_rules

    def with_policy(*given: object) -> object:
        found = rules(*given)  # type: ignore[arg-type]  # as they come
        policy = replace(found.policy, min_dense_rows=step_rules.MIN_DENSE_ROWS)
        return replace(found, policy=policy)

    monkeypatch.setattr(assembly, "batch_rules", with_policy)


def engine(family: str, **more: object) -> Parts:
    """Bound for CUDA, held on the CPU."""
    flags: dict[str, object] = {
        "model": f"random:{family},{WIDTHS}",
        "dtype": "bfloat16",
        "kv_layout": MODELS[family],
        "num_kv_pages": NUM_PAGES,
        "block_size": PAGE,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1536,
        "enable_prefix_caching": False,
        **more,
    }
    found = survey(EngineConfig.of(**flags), 512)
    resolved = replace(found.resolved, device=torch.device("cpu"))
    found = replace(found, resolved=resolved)
    loaded = open_model(
        found.source,
        resolved.dtype,
        resolved.device,
        None,
        num_positions=resolved.max_model_len,
        has_fp8=resolved.has_fp8,
    )
    rows = resolved.max_captured_prefill_tokens
    assert rows == 1024
    return put_together(
        found, loaded, budget=GPU_BUDGET, recorder=StaticRecorder(), captured_tokens=rows
    )


def random_step(chance: random.Random, most_tokens: int, max_len: int) -> Work:
    """One to twelve requests, some of one row, some at the end of a context, some fresh."""
    rows_left, pages_left, work = chance.choice([8, 60, 300, 900, most_tokens]), NUM_PAGES - 1, []
    for _ in range(chance.choice([1, 1, 2, 3, 5, 12])):
        rows = chance.choice([1, rows_left, chance.randint(1, rows_left)])
        length = min(max_len, rows + chance.choice([0, 0, 3000, chance.randint(0, 9000)]))
        if -(-length // PAGE) <= pages_left:
            work.append((rows, length))
            rows_left, pages_left = rows_left - rows, pages_left - -(-length // PAGE)
        if rows_left == 0:
            break
    return work


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.usefixtures("as_on_an_h200")
def test_no_step_launches_what_the_warm_up_did_not(family: str) -> None:
    chance, late = random.Random(11), {}
    with watching() as seen:
        parts = engine(family)
        warm_up(parts, lambda *_: None)
    limits, groups = parts.scheduler.config, parts.scheduler.pages.groups
    for _ in range(NUM_STEPS):
        work = random_step(chance, limits.max_num_batched_tokens, limits.max_model_len)
        with watching() as launched:
            parts.runner.run(_batch(parts.builder.rules, work, groups))
        for key in launched.keys() - seen.keys():
            late.setdefault(key, work)
    assert len(seen) > 40
    assert not late, "\n".join(f"{key} of {work}" for key, work in late.items())


@pytest.mark.usefixtures("as_on_an_h200")
def test_nor_does_any_number_of_rows_beside_a_dense_prompt_or_decoding() -> None:
    """A query latent of few groups of FP8: its kernel hangs on the number of rows that choose."""
    widths, late = WIDTHS.replace("q_rank=1536", "q_rank=512"), {}
    with watching() as seen:
        parts = engine("glm_moe_dsa", model=f"random:glm_moe_dsa,{widths}", kv_layout="fp8")
        warm_up(parts, lambda *_: None)
    works = [[(600, 600), (rows, rows + 3000)] for rows in (1, 3, 200, 255, 256, 300, 512, 900)]
    works += [[(1, 1500)] * count for count in range(1, 17)]
    for work in works:
        with watching() as launched:
            parts.runner.run(_batch(parts.builder.rules, work, parts.scheduler.pages.groups))
        late |= dict.fromkeys(launched.keys() - seen.keys(), work)
    assert not late, "\n".join(f"{key} of {work}" for key, work in late.items())


@pytest.mark.usefixtures("as_on_an_h200")
def test_neither_do_steps_of_an_engine_that_checks_some() -> None:
    """Those run eagerly, and operator by operator where they are looked at."""
    chance, late = random.Random(3), {}
    with watching() as seen:
        parts = engine("deepseek_v32", check="sampled")
        warm_up(parts, lambda *_: None)
    limits, groups, checker = parts.scheduler.config, parts.scheduler.pages.groups, parts.checker
    assert checker is not None
    for _ in range(NUM_STEPS):
        work = random_step(chance, limits.max_num_batched_tokens, limits.max_model_len)
        batch = _batch(parts.builder.rules, work, groups)
        usual = parts.runner.operators(batch.plan)
        looked_at = checker._checking(usual)
        looked_at._inspector.begin_step(batch.plan, batch.request_ids, frozenset())  # at no layer
        with watching() as launched:
            for ops in (usual, looked_at):
                parts.runner.run(batch, ops=ops, is_checked=False)
        late |= dict.fromkeys(launched.keys() - seen.keys(), work)
    assert not late, "\n".join(f"{key} of {work}" for key, work in late.items())


@pytest.mark.usefixtures("as_on_an_h200")
def test_it_would_notice() -> None:
    with watching() as seen:
        parts = engine("deepseek_v32")
    groups = parts.scheduler.pages.groups
    with watching() as launched:
        parts.runner.run(_batch(parts.builder.rules, [(300, 5000)], groups))
    assert launched.keys() - seen.keys()
