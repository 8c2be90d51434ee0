"""The sampling flags that `gnomon chat` and `gnomon generate` share.

Out: `SamplingFlags`, whose fields are flags; `params()` makes SamplingParams of them.
Errors: ConfigError where a request would be a RequestError: here it is the command line's fault.
Not here: the rest of SamplingParams; a client of the server reaches all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated as A

from gnomon.engine.flags import Flag, check_flags
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How to sample. `stop` is one string."""

    max_tokens: A[int, Flag("new tokens at most", least=1)] = 256
    temperature: A[float, Flag("0 is greedy, up to 2")] = 1.0
    top_p: A[float, Flag("nucleus mass, above 0 and up to 1")] = 1.0
    top_k: A[int, Flag("keep the best k tokens; 0 keeps all")] = 0
    stop: A[str | None, Flag("a string that ends the text")] = None
    ignore_eos: A[bool, Flag("go on after the end-of-sequence token")] = False

    def __post_init__(self) -> None:
        check_flags(self)

    def params(self, n: int = 1, seed: int | None = None) -> SamplingParams:
        """SamplingParams with these values."""
        try:
            return SamplingParams(
                n=n,
                seed=seed,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                stop=() if self.stop is None else (self.stop,),
                ignore_eos=self.ignore_eos,
            )
        except RequestError as error:
            raise ConfigError(str(error)) from None
