"""SamplingParams: how one request chooses its tokens and when it ends.

In:  the fields a client may set, under vLLM's names; `stop` also as one string, lists for tuples.
Out: a frozen value with tuples and floats in place, safe to send to the engine process. A value
     that exists is in range; what depends on the model is asked by `validate(vocab_size)`.
Errors: RequestError whose `param` is the name of the field at fault.
Not here: the sampling itself (engine/sampler.py), matching of stop strings (frontend), defaults
     that a server or a model's generation_config.json may put in place of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from gnomon.errors import RequestError

MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024  # of one string: the frontend holds back that much text
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIASES: Final = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The sampling wishes of a request; all checked when it is made, RequestError if not in range.

    n                    how many choices to generate, 1 to 128; each has its own noise
    temperature          0 (greedy) to 2
    top_p, min_p         nucleus mass in (0, 1]; least probability relative to the best, in [0, 1]
    top_k                keep the k best tokens; 0 or -1 keeps all
    presence_penalty,    -2 to 2, on tokens generated so far (once; per occurrence)
    frequency_penalty
    repetition_penalty   > 0, on tokens of prompt and output; 1 is off
    logit_bias           token id -> bias, -100 to 100, added to the logits
    min_tokens           as many tokens are generated before EOS or a stop token is possible
    max_tokens           at most so many are generated; None: as many as the context holds
    stop                 strings that end the text (matched outside of the engine)
    stop_token_ids       ids that end it; reported as `stop_reason`
    ignore_eos           go on after the model's end-of-sequence token
    seed                 int64; None lets the engine draw one
    logprobs             0 to 20: report the chosen token's and so many best; None: none
    prompt_logprobs      the same for the prompt's tokens
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: Sequence[str] = ()  # a tuple once made; one string and a list are welcome too
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Bring every field to its one form and refuse what is out of range."""
        self._check_integers()
        self._check_numbers()
        self._check_flags()
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken, without noise."""
        return self.temperature == 0.0

    @property
    def is_blind(self) -> bool:
        """Whether a token may be fed on before the host sees it: nothing counts or scores it."""
        has_penalty = self.presence_penalty or self.frequency_penalty
        is_counted = has_penalty or self.repetition_penalty != 1.0
        return not is_counted and self.logprobs is None and self.prompt_logprobs is None

    def validate(self, vocab_size: int) -> None:
        """Ask what needs the model: every token id named lies in [0, vocab_size)."""
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id, vocab_size)
        for token_id in self.logit_bias or ():
            _check_token_id("logit_bias", token_id, vocab_size)

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def _check_integers(self) -> None:
        _check_integer("n", self.n, 1, MAX_CHOICES)
        _check_integer("top_k", self.top_k, -1, None)
        _check_integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}, more than max_tokens = {self.max_tokens}; "
                    "raise max_tokens or lower min_tokens",
                    param="min_tokens",
                )
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, math.inf),
        ):
            self._set(name, _number(name, getattr(self, name), low, high))
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0.0:
                raise RequestError(f"{name} is 0; it must be above 0", param=name)

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}; it must be true or false", param=name)


def _check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer, {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be {allowed}", param=name)
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value}; it must be {allowed}", param=name)


def _number(name: str, value: Any, low: float, high: float) -> float:
    allowed = f"a number, {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} is {value!r}; it must be {allowed}", param=name)
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be finite and {allowed}", param=name)
    return float(value)


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise RequestError(
            f"{name} holds token id {token_id}; this model has ids 0 to {vocab_size - 1}",
            param=name,
        )


def _items(name: str, value: Any, what: str, limit: int) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r}; it must be a list of {what}", param=name)
    items = tuple(value)
    if len(items) > limit:
        raise RequestError(
            f"{name} holds {len(items)} {what}; at most {limit} are allowed", param=name
        )
    return items


def _stop_strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    strings = _items("stop", () if value is None else value, "strings", MAX_STOP_STRINGS)
    for text in strings:
        if not isinstance(text, str):
            raise RequestError(f"stop holds {text!r}; it must hold strings only", param="stop")
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop holds a string of {len(text)} characters; allowed are 1 to "
                f"{MAX_STOP_CHARACTERS}",
                param="stop",
            )
    return strings


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    ids = _items("stop_token_ids", () if value is None else value, "ids", MAX_STOP_TOKEN_IDS)
    for token_id in ids:
        _check_integer("stop_token_ids", token_id, 0, None)
    return ids


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(
            f"logit_bias is {value!r}; it must map token ids to numbers", param="logit_bias"
        )
    if len(value) > MAX_LOGIT_BIASES:
        raise RequestError(
            f"logit_bias names {len(value)} tokens; at most {MAX_LOGIT_BIASES} are allowed",
            param="logit_bias",
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        try:
            token_id = int(key)  # JSON spells the keys of an object as strings
        except (TypeError, ValueError):
            raise RequestError(
                f"logit_bias names {key!r}; its keys must be token ids", param="logit_bias"
            ) from None
        _check_integer("logit_bias", token_id, 0, None)
        biases[token_id] = _number("logit_bias", bias, -100.0, 100.0)
    return biases
