"""What can be set about a verification: frozen dataclasses whose fields are flags.

In:  keyword arguments, as the command line gives them.
Out: checked VerifySettings and SideSettings, or ConfigError that names field, value and what is
     allowed.
Not here: which laws exist (laws/), how flags are parsed (cli).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated as A
from typing import Any

from gnomon.engine.flags import Flag, Value, check_flags, from_flags, given_flags
from gnomon.errors import ConfigError

LAWS_PER_PROMPT = 5
LEAST_ENGINE_PROMPTS = 8
LEAST_CASES = 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much one round of the laws takes. `engine_prompts`: those of the laws of the engine."""

    prompts: int
    max_tokens: int
    max_length: int

    @property
    def engine_prompts(self) -> int:
        """A share of the prompts, but never too few to fill an engine."""
        return max(LEAST_ENGINE_PROMPTS, self.prompts // LAWS_PER_PROMPT)


WHOLE = Sizes(40, 64, 600)
IN_ROUNDS = Sizes(20, 32, 300)  # a round of all laws: about a minute on one core

ENGINE_FLAGS = (
    "model", "dtype", "weights", "kv_layout", "index_layout", "attention_provider",
    "prefill_backend", "decode_backend", "index_backend", "moe_backend", "linear_backend",
    "provider_path",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Everything that can be set about a verification."""

    model: A[
        str | None,
        Flag(
            "folder in Hugging Face layout, random:NAME,key=value or builtin:NAME; not given: "
            "builtin:tiny"
        ),
    ] = None
    prompts: A[
        int | None,
        Flag(
            "prompts compared with transformers; laws of the engine take a fifth, 8 or more; not "
            "given: 40, or 20 a round with --minutes",
            least=1,
        ),
    ] = None
    minutes: A[
        float | None,
        Flag(
            "run the laws again and again on other prompts until so many minutes are over; every "
            "law gets --least-cases first",
            least=0.01,
        ),
    ] = None
    least_cases: A[
        int, Flag("cases without which a law has not passed, with --minutes", least=1)
    ] = LEAST_CASES
    seed: A[int, Flag("seed of prompts and inputs, not of random weights", least=0)] = 0
    laws: A[str | None, Flag("names of laws, with commas; not given: all")] = None
    max_tokens: A[
        int | None,
        Flag("greedy tokens after each prompt; not given: 64, or 32 with --minutes", least=1),
    ] = None
    max_length: A[
        int | None,
        Flag("longest prompt, in tokens; not given: 600, or 300 with --minutes", least=1),
    ] = None
    hf_overrides: A[
        dict[str, Any], Flag("fields of config.json to replace, as JSON; a.b reaches into a")
    ] = field(default_factory=dict)
    attention_provider: A[
        str, Flag("who computes the attention operators: auto, or a provider's name")
    ] = "auto"
    kv_layout: A[
        str,
        Flag(
            "byte format of the latent cache: auto, or a layout's id; a random model takes the "
            "widths that it needs",
            ("--kv-cache-dtype",),
        ),
    ] = "auto"
    index_layout: A[str, Flag("byte format of the index keys: auto, or a layout's id")] = "auto"
    device: A[str, Flag("where the engines run", choices=("auto", "cpu", "cuda"))] = "auto"
    dtype: A[
        str,
        Flag(
            "dtype of weights and activations; with 16 bits all choices are replayed",
            choices=("float32", "bfloat16", "float16", "float64"),
        ),
    ] = "float32"
    weights: A[
        str,
        Flag(
            "FP8 weights: multiplied as they are, or dequantised; auto: fp8 where the device can",
            choices=("auto", "fp8", "dequantise"),
        ),
    ] = "auto"
    prefill_backend: A[str, Flag("who attends in prefill: auto, or a provider")] = "auto"
    decode_backend: A[str, Flag("who attends in decode: auto, or a provider")] = "auto"
    index_backend: A[str, Flag("who computes index scores: auto, or a provider")] = "auto"
    moe_backend: A[str, Flag("who computes the experts: auto, or a provider")] = "auto"
    linear_backend: A[str, Flag("who multiplies with FP8 weights: auto, or a provider")] = "auto"
    provider_path: A[str | None, Flag("folder of libraries that are not installed")] = None
    block_size: A[
        int | None,
        Flag("tokens per cache page; not given: 16, 64 on a GPU", ("--page-size",), least=1),
    ] = None
    cpu_threads: A[
        int | None, Flag("threads of the CPU operators; not given: torch's own choice", least=1)
    ] = None

    def __post_init__(self) -> None:
        check_flags(self)
        if self.minutes is None and self.least_cases != LEAST_CASES:
            raise ConfigError(
                f"least_cases is {self.least_cases}, but every law runs once in whole without "
                "--minutes. Give --minutes, or leave --least-cases out."
            )

    @classmethod
    def of(cls, **flags: Any) -> VerifySettings:
        """The settings of these flags; an unknown name is refused with the nearest known one."""
        return from_flags(cls, flags)

    def given(self) -> Mapping[str, Value]:
        """The fields that differ from their default."""
        return given_flags(self)

    def engine_flags(self) -> dict[str, Any]:
        """Those that an engine has too, by its own names."""
        return {name: getattr(self, name) for name in ENGINE_FLAGS}

    @property
    def sizes(self) -> Sizes:
        """What was given, and the defaults of the way in which the laws are run."""
        default = WHOLE if self.minutes is None else IN_ROUNDS
        return Sizes(
            default.prompts if self.prompts is None else self.prompts,
            default.max_tokens if self.max_tokens is None else self.max_tokens,
            default.max_length if self.max_length is None else self.max_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSettings:
    """What can be set about a comparison of two sides, beside the arms."""

    against: A[
        str | None, Flag("URL of a running server to compare with, by tokens and logprobs")
    ] = None
    against_model: A[
        str | None, Flag("the model's name there; not given: the first one that it lists")
    ] = None
    tolerance: A[
        float | None,
        Flag("what two sides may differ by; not given: by their precision", least=1e-9),
    ] = None

    def __post_init__(self) -> None:
        check_flags(self)

    def check_use(self, num_arms: int) -> None:
        """Refuse what would be ignored."""
        if self.tolerance is not None and not (num_arms or self.against):
            raise ConfigError("--tolerance is for --arm and --against; laws have their own.")
        if self.against_model is not None and self.against is None:
            raise ConfigError("--against-model is for --against: give the server's URL.")
