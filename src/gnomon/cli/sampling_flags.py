"""The sampling flags that `gnomon chat` and `gnomon generate` share.

Out: `SamplingFlags`, whose fields are flags; `params()` makes SamplingParams of them. What is not
     given comes from the model's generation_config.json, as in a server.
Errors: ConfigError where a request would be a RequestError: here it is the command line's fault.
Not here: the rest of SamplingParams; a client of the server reaches all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated as A
from typing import Any

from gnomon.engine.flags import Flag, check_flags
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How to sample. `stop` is one string."""

    max_tokens: A[int, Flag("new tokens at most", least=1)] = 256
    temperature: A[
        float | None, Flag("0 is greedy, up to 2; not given: as the model's files say, else 1")
    ] = None
    top_p: A[
        float | None, Flag("nucleus mass, above 0 and up to 1; not given: as the files say, else 1")
    ] = None
    top_k: A[
        int | None, Flag("keep the best k tokens, 0: all; not given: as the files say, else 0")
    ] = None
    stop: A[str | None, Flag("a string that ends the text")] = None
    ignore_eos: A[bool, Flag("go on after the end-of-sequence token")] = False

    def __post_init__(self) -> None:
        check_flags(self)

    def params(self, n: int = 1, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """SamplingParams with these values; `defaults` are the model's own."""
        chosen = {key: value for key, value in (defaults or {}).items() if key != "max_tokens"}
        for name in ("temperature", "top_p", "top_k"):
            if getattr(self, name) is not None:
                chosen[name] = getattr(self, name)
        try:
            return SamplingParams(
                n=n,
                max_tokens=self.max_tokens,
                stop=() if self.stop is None else (self.stop,),
                ignore_eos=self.ignore_eos,
                **chosen,
            )
        except RequestError as error:
            raise ConfigError(str(error)) from None
