"""A step that took the device with it: what the host knew of it, written down and done again.

In:  the step's schedule (its requests, tokens, pages), the error, the engine's flags; later the
     file, in another process.
Out: a JSON object; `again`: the same rows on the same pages, over caches that hold what they held.
     What was cached before the step is computed again from the tokens, each request by itself.
Caches and weights went with the device, so this needs the model, and the history's bits may differ
in their last places. Redacted facts hold no tokens and cannot be done again.
Not here: when it is written (record_witness.py), where (record.py), the display (cli/replay.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gnomon.engine.config import EngineConfig
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.schedule_step import ScheduledRequest, StepSchedule
from gnomon.errors import ConfigError

if TYPE_CHECKING:
    from gnomon.engine.assembly import Parts

SUFFIX = "-lost.json"
FORMAT = "gnomon.lost_step"
GREEDY = SamplingParams(temperature=0.0)
ABOUT_RECORDS = ("record", "record_steps", "redact", "shadow", "overlap", "served_model_name")
ABOUT_GPUS = (
    "gpu_memory_utilization",
    "max_captured_prefill_tokens",
    "attention_provider",
    "prefill_backend",
    "decode_backend",
    "index_backend",
    "linear_backend",
    "moe_backend",
)


@dataclass(frozen=True, slots=True)
class LostStep:
    """What a file says. ``requests``: as `facts_of` wrote them."""

    step_id: int
    error: str
    flags: Mapping[str, Any]
    vocab_size: int
    groups: tuple[str, ...]
    requests: tuple[Mapping[str, Any], ...]

    @property
    def num_unknown(self) -> int:
        """Tokens that had been sampled and had not come to the host; 0 stands for each."""
        return sum(_kv_len(one) - len(one["tokens"]) for one in self.requests)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return sum(one["num_new_tokens"] for one in self.requests)


def facts_of(
    schedule: StepSchedule, error: str, origin: Mapping[str, Any], is_redacted: bool
) -> dict[str, Any]:
    """All that is known of a step. ``origin``: flags, vocab_size and versions."""
    return {
        "format": FORMAT,
        "step": schedule.step_id,
        "error": error,
        "groups": list(schedule.groups),
        **origin,
        "requests": [
            {
                "request_id": place if is_redacted else item.request_id,
                "num_computed": item.num_computed,
                "num_new_tokens": item.num_new_tokens,
                "needs_sample": item.needs_sample,
                "tokens": None if is_redacted else item.tokens[: item.kv_len],
                "pages": {
                    group: pages.tolist()
                    for group, pages in zip(schedule.groups, item.pages, strict=True)
                },
            }
            for place, item in enumerate(schedule.items)
        ],
    }


def read_lost_step(path: Path) -> LostStep:
    """The step in a file; ConfigError if there is none, or none that can be done again."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        found = LostStep(
            step_id=int(facts["step"]),
            error=str(facts["error"]),
            flags=dict(facts["flags"]),
            vocab_size=int(facts["vocab_size"]),
            groups=tuple(facts["groups"]),
            requests=tuple(facts["requests"]),
        )
        if facts["format"] != FORMAT:
            raise ValueError(f"format is {facts['format']!r}, not {FORMAT!r}")
        for one in found.requests:
            _require_facts(one, found.groups)
        is_redacted = any(one["tokens"] is None for one in found.requests)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no lost step that can be done again ({type(error).__name__}: {error}); it "
            f"has to be a *{SUFFIX} of gnomon serve --record."
        ) from None
    if is_redacted:
        raise ConfigError(
            f"{path} was written with --redact: it holds no tokens, so the step cannot be done "
            "again. Record without --redact."
        )
    return found


def _require_facts(request: Mapping[str, Any], groups: tuple[str, ...]) -> None:
    """KeyError, TypeError or ValueError if a request lacks what `facts_of` writes."""
    for name in ("request_id", "needs_sample", "tokens"):
        request[name]
    int(request["num_computed"]), int(request["num_new_tokens"])
    for group in groups:
        np.array(request["pages"][group], dtype=np.int32)


def config_for(lost: LostStep, device: str | None, changes: Mapping[str, Any]) -> EngineConfig:
    """The engine's flags as they were, but for those on records, with room for the step's pages.

    ``device``: None keeps the recorded flag; "cpu" leaves out what only a GPU heeds. ``changes``:
    flags that replace recorded ones.
    """
    flags = {name: value for name, value in lost.flags.items() if name not in ABOUT_RECORDS}
    if device is not None:
        flags["device"] = device
    if device == "cpu":
        flags = {name: value for name, value in flags.items() if name not in ABOUT_GPUS}
    pages = [page for one in lost.requests for held in one["pages"].values() for page in held]
    size = int(flags.get("block_size", EngineConfig().block_size))
    longest = -(-int(flags.get("max_model_len", 0)) // size)
    flags["num_kv_pages"] = max([2, longest + 1, *(page + 1 for page in pages)])
    flags.pop("kv_cache_memory", None)
    return EngineConfig.of(**{**flags, **changes})


def again(lost: LostStep, parts: Parts, tell: Callable[[int, int], None]) -> dict[str, str]:
    """Fill the caches, then run the step: request id -> why it must fail, empty if none must.

    ``tell``: (requests whose caches are filled, of how many). What the step raises goes through.
    """
    most = int(parts.info.resolved["max_num_batched_tokens"][0])
    for done, facts in enumerate(lost.requests):
        tell(done, len(lost.requests))
        for start in range(0, facts["num_computed"], most):
            stop = min(start + most, facts["num_computed"])
            history = _item(lost, facts, start, stop, is_last=False)
            parts.runner.run(parts.builder.build(_schedule(lost, (history,))))
    tell(len(lost.requests), len(lost.requests))
    items = tuple(
        _item(lost, facts, facts["num_computed"], _kv_len(facts), is_last=True)
        for facts in lost.requests
    )
    output = parts.runner.run(parts.builder.build(_schedule(lost, items)))
    faults = output.verdict.faults()
    output.logits.sum().item()  # waits for the device, which may be lost by now
    return faults


def _kv_len(facts: Mapping[str, Any]) -> int:
    return int(facts["num_computed"]) + int(facts["num_new_tokens"])


def _schedule(lost: LostStep, items: tuple[ScheduledRequest, ...]) -> StepSchedule:
    num_tokens = sum(item.num_new_tokens for item in items)
    return StepSchedule(lost.step_id, items, lost.groups, num_tokens)


def _item(
    lost: LostStep, facts: Mapping[str, Any], start: int, stop: int, is_last: bool
) -> ScheduledRequest:
    """The rows ``start`` to ``stop`` of a request."""
    name = str(facts["request_id"])
    tokens = [*facts["tokens"], *[0] * (_kv_len(facts) - len(facts["tokens"]))]
    return ScheduledRequest(
        request=EngineRequest(request_id=name, prompt_token_ids=tokens, params=GREEDY),
        num_computed=start,
        num_new_tokens=stop - start,
        token_ids=tokens[start:stop],
        pages=tuple(np.array(facts["pages"][group], dtype=np.int32) for group in lost.groups),
        needs_sample=is_last and bool(facts["needs_sample"]),
        tokens=tokens,
    )
