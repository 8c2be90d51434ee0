"""The log of a start: what was found out, the memory plan, who serves what."""

from __future__ import annotations

from gnomon.engine.assembly import survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.start_log import start_lines

ROWS = [
    ("topk", "triton", "fastest", "torch: slower"),
    ("moe, prefill", "deepgemm", "fastest", ""),
    ("rope", "triton", "fastest", ""),
    ("moe, decode", "triton", "forced", ""),
]


def test_what_was_found_out_is_said_and_what_was_given_is_not() -> None:
    config = EngineConfig.of(model="random:glm_moe_dsa", num_kv_pages=64, seed=7)
    lines = list(start_lines(survey(config).resolved, ROWS))
    assert "dtype is float32 (model: what its config.json says)" in lines
    assert "max_model_len is 4032 (machine: what the cache holds: num_kv_pages)" in lines
    assert not [
        line for line in lines if line.startswith(("seed ", "num_kv_pages ", "block_size "))
    ]
    assert lines[-3:] == [
        "triton (fastest) serves topk; rope",
        "deepgemm (fastest) serves moe, prefill",
        "triton (forced) serves moe, decode",
    ]


def test_the_memory_plan_is_said() -> None:
    class Plan:
        def shown(self) -> list[str]:
            return ["weights 1 MiB", "cache 2 MiB"]

    resolved = survey(EngineConfig.of(model="random:glm_moe_dsa", num_kv_pages=64)).resolved
    object.__setattr__(resolved, "memory", Plan())
    lines = list(start_lines(resolved, ()))
    assert lines[-2:] == ["memory: weights 1 MiB", "memory: cache 2 MiB"]
