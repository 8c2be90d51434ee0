"""Arms as text: what is read, and what is refused with the names that are allowed."""

from __future__ import annotations

import pytest

from gnomon.attention.sharding import ShardStrategy
from gnomon.errors import ConfigError
from gnomon.verify.arm_flags import engine_keys, parse_arm


def test_flags_get_their_own_types() -> None:
    arm = parse_arm(
        "max_prefill_chunk=7, enable_prefix_caching=on,kv_layout=bf16_576,--dtype=float32"
    )
    assert dict(arm.flags) == {
        "max_prefill_chunk": 7,
        "enable_prefix_caching": True,
        "kv_layout": "bf16_576",
        "dtype": "float32",
    }
    assert (arm.ranks, arm.rows) == (1, None)


def test_ranks_and_rows() -> None:
    arm = parse_arm("cp=4,cp-strategy=zigzag,rows=16")
    assert (arm.ranks, arm.strategy, arm.rows) == (4, ShardStrategy.ZIGZAG, 16)
    assert dict(arm.flags) == {}
    assert arm.label == "cp=4,cp-strategy=zigzag,rows=16"


def test_no_flag_is_the_engine_as_it_is() -> None:
    arm = parse_arm(" ")
    assert (dict(arm.flags), arm.label) == ({}, "as it is")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv_layut=fp8", "Did you mean 'kv_layout'"),
        ("zzz=1", "Allowed: cp, cp_strategy, rows, graphs, dtype"),
        ("model=x", "no key is called 'model'"),
        ("tensor_parallel_size=2", "no key is called"),
        ("shadow=0.1", "no key is called"),
        ("cp", "'cp' has no value"),
        ("cp=", "has no value"),
        ("cp=0", "a number from 1 to 16"),
        ("cp=17", "a number from 1 to 16"),
        ("cp=two", "a number from 1 to 16"),
        ("cp=2,cp=3", "given twice"),
        ("cp_strategy=zigzag", "cp_strategy needs cp=2"),
        ("cp=2,cp_strategy=stripes", "allowed are round_robin, zigzag"),
        ("cp=2,check=full", "checked mode does not see simulated ranks"),
        ("enable_prefix_caching=maybe", "allowed are true, false"),
        ("max_prefill_chunk=many", "of type int"),
        ("max_prefill_chunk=0", "at least 1"),
        ("dense_route=often", "allowed are auto, never"),
    ],
)
def test_wrong_arms_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arm(text)


def test_every_key_is_a_flag_that_two_engines_can_differ_in() -> None:
    assert {"kv_layout", "dtype", "block_size", "dense_route"} <= engine_keys().keys()
    assert not {"model", "record", "seed", "hf_overrides", "num_kv_pages"} & engine_keys().keys()
