"""What can be set about a verification: one frozen dataclass, fields are flags.

In:  keyword arguments, as the command line gives them.
Out: a checked VerifySettings, or ConfigError that names field, value and what is allowed.
Not here: which laws exist (laws/), how flags are parsed (cli).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated as A
from typing import Any

from gnomon.engine.flags import Flag, Value, check_flags, from_flags, given_flags

LAWS_PER_PROMPT = 5
LEAST_ENGINE_PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Everything that can be set about a verification."""

    model: A[
        str | None,
        Flag(
            "folder in Hugging Face layout, or random:NAME,key=value; not given: a small built-in"
        ),
    ] = None
    prompts: A[
        int,
        Flag(
            "prompts compared with transformers; laws of the engine take a fifth, 8 or more",
            least=1,
        ),
    ] = 40
    seed: A[int, Flag("seed of prompts and inputs, not of random weights", least=0)] = 0
    laws: A[str | None, Flag("names of laws, with commas; not given: all")] = None
    max_tokens: A[int, Flag("greedy tokens after each prompt", least=1)] = 64
    max_length: A[int, Flag("longest prompt, in tokens", least=1)] = 600
    hf_overrides: A[
        dict[str, Any], Flag("fields of config.json to replace, as JSON; a.b reaches into a")
    ] = field(default_factory=dict)
    attention_provider: A[
        str, Flag("who computes the attention operators: auto, or a provider's name")
    ] = "auto"
    block_size: A[int, Flag("tokens per cache page", ("--page-size",), least=1)] = 16
    cpu_threads: A[
        int | None, Flag("threads of the CPU operators; not given: torch's own choice", least=1)
    ] = None

    def __post_init__(self) -> None:
        check_flags(self)

    @classmethod
    def of(cls, **flags: Any) -> VerifySettings:
        """The settings of these flags; an unknown name is refused with the nearest known one."""
        return from_flags(cls, flags)

    def given(self) -> Mapping[str, Value]:
        """The fields that differ from their default."""
        return given_flags(self)

    @property
    def engine_prompts(self) -> int:
        """How many prompts the laws of the engine take."""
        return max(LEAST_ENGINE_PROMPTS, self.prompts // LAWS_PER_PROMPT)
