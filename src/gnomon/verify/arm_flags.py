"""What stands behind `--arm`: engine flags as text, "key=value,key=value".

In:  the text; keys are the engine's flags (underscores), and a few of this module's own:
     cp (n simulated context-parallel ranks in this process), cp_strategy (round_robin, zigzag),
     rows (every step padded to a multiple of it) and graphs (decode steps captured and replayed:
     CUDA graphs on a GPU, the same plans and buffers on a CPU).
Out: an Arm, or ConfigError that names the key, the value and what is allowed.
Flags that cannot tell two engines of one verification apart (the model, its length, who may queue,
what is recorded) are no keys: an accepted key is honoured.
Not here: what the flags mean (engine/config.py), running arms (arms.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Final

from gnomon.attention.sharding import ShardStrategy
from gnomon.engine.config import EngineConfig, FlagSpec, flag_specs
from gnomon.errors import ConfigError
from gnomon.verify.engines import Arm, Capture

MOST_RANKS = 16
MOST_ROWS = 4096
NO_KEYS: Final = frozenset({
    "model", "tokenizer", "served_model_name", "hf_overrides", "seed", "max_model_len",
    "max_queue_size", "num_kv_pages", "kv_cache_memory", "gpu_memory_utilization",
    "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "cpu_threads",
    "record", "record_steps", "redact", "shadow", "drain_timeout_s", "enforce_eager", "overlap",
})  # fmt: skip
BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "yes": True, "on": True, "1": True,
                   "false": False, "no": False, "off": False, "0": False}  # fmt: skip


def engine_keys() -> Mapping[str, FlagSpec]:
    """The engine's flags that an arm may set."""
    return {
        spec.name: spec
        for spec in flag_specs(EngineConfig)
        if spec.name not in NO_KEYS and spec.type is not dict
    }


def parse_arm(text: str) -> Arm:
    """The arm that a text describes."""
    known = engine_keys()
    flags: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for setting in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in setting.partition("="))
        key = key.removeprefix("--").replace("-", "_")
        if not equals or not value:
            raise ConfigError(f"arm {text!r}: {setting!r} has no value. Write key=value,key=value.")
        if key in flags or key in own:
            raise ConfigError(f"arm {text!r}: {key!r} is given twice. Give it once.")
        if key in OWN_KEYS:
            own[key] = OWN_KEYS[key](text, key, value)
        elif key in known:
            flags[key] = _value(text, known[key], value)
        else:
            raise ConfigError(f"arm {text!r}: {_unknown(key, [*OWN_KEYS, *known])}")
    if own.get("cp", 1) > 1 and flags.get("check") not in (None, "off"):
        raise ConfigError(f"arm {text!r}: checked mode does not see simulated ranks; leave it out.")
    if own.get("graphs") and (own.get("cp", 1) > 1 or flags.get("check") not in (None, "off")):
        raise ConfigError(
            f"arm {text!r}: simulated ranks and checked mode run eagerly; leave graphs out."
        )
    if "cp_strategy" in own and own.get("cp", 1) == 1:
        raise ConfigError(f"arm {text!r}: cp_strategy needs cp=2 or more.")
    EngineConfig.of(**flags)  # refuses values that no engine takes
    return Arm(
        flags,
        rows=own.get("rows"),
        ranks=own.get("cp", 1),
        strategy=own.get("cp_strategy", ShardStrategy.ROUND_ROBIN),
        label=text.strip() or "as it is",
        capture=Capture.FREE if own.get("graphs") else Capture.NONE,
    )


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"no key is called {key!r}.{hint} Allowed: {', '.join(known)}."


def _value(text: str, spec: FlagSpec, value: str) -> Any:
    if spec.is_optional and value.lower() == "none":
        return None
    if spec.type is bool:
        return _boolean(text, spec.name, value)
    try:
        return spec.type(value)
    except ValueError:
        raise ConfigError(
            f"arm {text!r}: {spec.name} is {value!r}: it has to be of type {spec.type.__name__}."
        ) from None


def _boolean(text: str, key: str, value: str) -> bool:
    if value.lower() not in BOOLEANS:
        raise ConfigError(f"arm {text!r}: {key} is {value!r}: allowed are true, false.")
    return BOOLEANS[value.lower()]


def _number(most: int) -> Callable[[str, str, str], int]:
    def read(text: str, key: str, value: str) -> int:
        if not value.isdecimal() or not 1 <= int(value) <= most:
            raise ConfigError(
                f"arm {text!r}: {key} is {value!r}: it has to be a number from 1 to {most}."
            )
        return int(value)

    return read


def _strategy(text: str, key: str, value: str) -> ShardStrategy:
    if value not in list(ShardStrategy):
        raise ConfigError(
            f"arm {text!r}: {key} is {value!r}: allowed are {', '.join(ShardStrategy)}."
        )
    return ShardStrategy(value)


OWN_KEYS: Final[Mapping[str, Callable[[str, str, str], Any]]] = {
    "cp": _number(MOST_RANKS),
    "cp_strategy": _strategy,
    "rows": _number(MOST_ROWS),
    "graphs": _boolean,
}
