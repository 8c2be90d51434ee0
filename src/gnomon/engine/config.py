"""The engine's configuration: one frozen dataclass; its fields are the flags, help text included.

In:  keyword arguments (`EngineConfig.of(**flags)`), as `LLM(...)` or the command line gives them.
Out: a checked EngineConfig, or ConfigError that names field, value, what is allowed.
`flag_specs(EngineConfig)` (flags.py) is what the CLI, its --help and the docs are made from.
None means "not given": engine/resolve.py turns it into a value and says from where.
Not here: anything that needs the model or the machine (engine/resolve.py), sampling parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated as A
from typing import Any

from gnomon.engine.flags import (
    Flag,
    FlagSpec,
    Value,
    check_flags,
    flag_specs,
    from_flags,
    given_flags,
)
from gnomon.errors import ConfigError

__all__ = ["EngineConfig", "Flag", "FlagSpec", "check_flags", "flag_specs", "parse_bytes"]

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that can be set about an engine. Build it with `EngineConfig.of`."""

    model: A[
        str | None,
        Flag(
            "folder in Hugging Face layout, random:NAME,key=value or builtin:NAME; not given: "
            "builtin:tiny"
        ),
    ] = None
    tokenizer: A[str | None, Flag("folder of tokenizer.json; not given: the model's own")] = None
    served_model_name: A[str | None, Flag("name in /v1/models; not given: the model's label")] = (
        None
    )
    hf_overrides: A[
        dict[str, Any], Flag("fields of config.json to replace, as JSON; a.b reaches into a")
    ] = field(default_factory=dict)
    dtype: A[str, Flag("dtype of weights and activations", choices=DTYPES)] = "auto"
    weights: A[
        str,
        Flag(
            "FP8 weights: multiplied as they are, or dequantised at loading; auto: fp8 on GPUs "
            "that multiply it",
            choices=("auto", "fp8", "dequantise"),
        ),
    ] = "auto"
    device: A[str, Flag("where the model runs", choices=("auto", "cpu", "cuda"))] = "auto"
    seed: A[int, Flag("seed of random weights and of requests that bring none", least=0)] = 0
    max_model_len: A[
        int | None, Flag("longest sequence, prompt and output together, in tokens", least=2)
    ] = None
    max_num_seqs: A[int | None, Flag("requests that run at the same time", least=1)] = None
    max_num_batched_tokens: A[int | None, Flag("tokens computed in one step", least=1)] = None
    max_prefill_chunk: A[
        int | None,
        Flag("prompt tokens of one request per step; not given: no own bound", least=1),
    ] = None
    max_queue_size: A[int, Flag("requests that may wait; one more is answered 429", least=1)] = (
        16384
    )
    scheduling_policy: A[
        str, Flag("who goes first", ("--schedule-policy",), choices=("fcfs", "priority"))
    ] = "fcfs"
    block_size: A[int, Flag("tokens per cache page", ("--page-size",), least=1)] = 64
    kv_layout: A[
        str,
        Flag("byte format of the latent cache: auto, or a layout's id", ("--kv-cache-dtype",)),
    ] = "auto"
    index_layout: A[
        str,
        Flag(
            "byte format of the index keys: auto (fp8 beside fp8 latents, and on a GPU for models "
            "in bfloat16, as they were trained; else the latents' dtype), or a layout's id"
        ),
    ] = "auto"
    num_kv_pages: A[
        int | None,
        Flag(
            "pages of the cache; overrides the byte budget", ("--num-gpu-blocks-override",), least=2
        ),
    ] = None
    kv_cache_memory: A[
        str | None, Flag('byte budget of the cache, as "4GiB", "512MiB" or plain bytes')
    ] = None
    gpu_memory_utilization: A[
        float | None, Flag("share of the GPU's memory to use (CUDA only)", least=0.05, greatest=1.0)
    ] = None
    enable_prefix_caching: A[bool, Flag("reuse the cache pages of shared prefixes")] = True
    dense_route: A[
        str,
        Flag(
            "when a prompt may be attended densely",
            choices=("auto", "never", "always_when_allowed"),
        ),
    ] = "auto"
    attention_provider: A[
        str, Flag("who computes the attention operators: auto, or a provider's name")
    ] = "auto"
    prefill_backend: A[
        str, Flag("who attends in prefill and mixed steps: auto, or flashmla, fa3, triton, ...")
    ] = "auto"
    decode_backend: A[
        str, Flag("who attends in decode steps: auto, or flashmla, fa3, triton, ...")
    ] = "auto"
    index_backend: A[
        str, Flag("who computes index scores: auto, or deepgemm, triton, torch, ...")
    ] = "auto"
    moe_backend: A[str, Flag("who computes the experts: auto, or deepgemm, triton, torch, ...")] = (
        "auto"
    )
    linear_backend: A[
        str, Flag("who multiplies with FP8 weights: auto, or deepgemm, triton, torch, ...")
    ] = "auto"
    provider_path: A[
        str | None,
        Flag("folder of libraries that are not installed: _flashmla_C.abi3.so, deep_gemm, ..."),
    ] = None
    deterministic: A[
        bool,
        Flag("the bits of an answer do not depend on other requests (CPU: float32; costs speed)"),
    ] = False
    enforce_eager: A[bool, Flag("never capture CUDA graphs (they do not exist on CPU)")] = False
    max_captured_prefill_tokens: A[
        int | None,
        Flag(
            "prefill steps of up to so many tokens run in CUDA graphs between their attentions; "
            "0: none; not given: 1,024 on a GPU",
            least=0,
        ),
    ] = None
    overlap: A[
        str,
        Flag(
            "queue a step before the one ahead of it has landed; auto: on a GPU",
            choices=("auto", "on", "off"),
        ),
    ] = "auto"
    tensor_parallel_size: A[int, Flag("GPUs that split each layer", ("-tp",), least=1)] = 1
    data_parallel_size: A[int, Flag("replicas of the attention part", ("-dp",), least=1)] = 1
    enable_expert_parallel: A[bool, Flag("spread whole experts over the GPUs", ("--ep",))] = False
    cpu_threads: A[
        int | None, Flag("threads of the CPU operators; not given: torch's own choice", least=1)
    ] = None
    check: A[
        str | None,
        Flag(
            "check operators as they run: off, sampled (each layer once in 256 steps) or full "
            "(slow); not given: what GNOMON_CHECK says",
            choices=("off", "sampled", "full"),
        ),
    ] = None
    record: A[str | None, Flag("folder for steps that fail, and for those of --record-steps")] = (
        None
    )
    record_steps: A[
        str, Flag("which steps to record: on-failure, one as 12, or several as 12..15")
    ] = "on-failure"
    redact: A[bool, Flag("leave token ids, names and embeddings out of what is recorded")] = False
    shadow: A[
        float,
        Flag("share of steps that the reference computes again, unseen", least=0.0, greatest=1.0),
    ] = 0.0
    drain_timeout_s: A[
        float, Flag("seconds that running requests get to finish after SIGTERM", least=0.0)
    ] = 30.0

    def __post_init__(self) -> None:
        check_flags(self)
        try:
            json.dumps(self.hf_overrides)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"hf_overrides is {self.hf_overrides!r}: it has to be what JSON can hold ({error})."
            ) from error
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) != 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: this version runs on one device, so only 1 "
                    f"is allowed. Leave {name} out."
                )
        if self.enable_expert_parallel:
            raise ConfigError(
                "enable_expert_parallel needs several devices and this version runs on one. "
                "Leave it out."
            )

    @classmethod
    def of(cls, **flags: Any) -> EngineConfig:
        """The config of these flags; an unknown name is refused with the nearest known one."""
        memory = flags.get("kv_cache_memory")
        if type(memory) is int:
            flags["kv_cache_memory"] = str(memory)
        return from_flags(cls, flags)

    def given(self) -> Mapping[str, Value]:
        """The fields that differ from their default."""
        return given_flags(self)


def parse_bytes(text: str) -> int:
    """Bytes of "4GiB", "512MiB", "1e9", "2.5GB" or a plain number; ConfigError otherwise."""
    units = {
        "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
        "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "b": 1,
    }  # fmt: skip
    stripped = text.strip().lower().replace(" ", "")
    unit = next((unit for unit in units if stripped.endswith(unit)), "")
    number = stripped.removesuffix(unit)
    try:
        count = float(number) * units.get(unit, 1)
    except ValueError:
        count = float("nan")
    if not 0 < count < 2**60:
        raise ConfigError(
            f'kv_cache_memory is {text!r}: it has to be a size such as "4GiB", "512MiB" or a '
            "number of bytes."
        )
    return int(count)
