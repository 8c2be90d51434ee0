"""Streamed text = whole text, at every split; so for stop strings.

In:  the model's tokenizer; texts of many scripts, and sequences of random ids, which break UTF-8
     everywhere.
Each sequence of ids is cut in two at every place, and fed token by token: what comes out, put
together, is the decoding of all ids. With a stop string taken out of the text, what is shown is the
text up to it, whatever the portions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from gnomon.engine.config import EngineConfig
from gnomon.frontend.language import language_of
from gnomon.text.detokenize import Detokenizer
from gnomon.text.stops import StopMatcher
from gnomon.text.tokenizer import Tokenizer
from gnomon.verify.context import Context
from gnomon.verify.law import Law
from gnomon.verify.result import NotRunError, Tally

TEXTS = (
    "The shadow of a gnomon falls where the sun says.",
    "日晷之影，隨日而移。",
    "Тень гномона ползёт по плите.",
    "ظل المزولة",
    "🌞🕰️👩🏽‍🔬 é é ñ ǆ ﷽ 𒀱",
    "a\tb\r\n\n  c   d\u00a0e\u200bf\x00g",
    "<|im_start|>user</s><｜User｜>",
)
NUM_RANDOM = 40
RANDOM_LENGTH = 24


def _text(context: Context) -> Tally:
    language = language_of(EngineConfig.of(model=context.settings.model))
    if language is None:
        raise NotRunError("the model has no tokenizer: put tokenizer.json into its folder")
    tokenizer = language.tokenizer
    rng = random.Random(f"{context.settings.seed}:text")
    sequences: list[list[int]] = [tokenizer.encode_plain(text) for text in TEXTS]
    for _ in range(NUM_RANDOM):
        sequences.append([rng.randrange(tokenizer.vocab_size) for _ in range(RANDOM_LENGTH)])
    tally = context.tally("")
    for done, ids in enumerate(sequences):
        for skips_specials in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skips_specials)
            _splits(tally, tokenizer, ids, whole, skips_specials)
        _stops(tally, tokenizer.decode(ids), rng)
        context.step(done, len(sequences))
    return tally


def _splits(
    tally: Tally, tokenizer: Tokenizer, ids: Sequence[int], whole: str, skips_specials: bool
) -> None:
    """All ways to cut the ids in two, and one token at a time."""
    cuts: list[list[Sequence[int]]] = [[ids[:place], ids[place:]] for place in range(len(ids) + 1)]
    cuts.append([[index] for index in ids])
    for portions in cuts:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips_specials)
        streamed = "".join(detokenizer.feed(portion) for portion in portions)
        streamed += detokenizer.finish()
        failure = None
        if streamed != whole:
            failure = f"ids {list(ids)} in portions of {[len(p) for p in portions]}: {streamed!r}"
        tally.add(failure=failure)


def _stops(tally: Tally, text: str, rng: random.Random) -> None:
    """A piece of the text, and one that is not in it, as stop strings."""
    if not text:
        return
    start = rng.randrange(len(text))
    stops = (text[start : start + rng.randint(1, 5)], text[:3] + "\x01")
    expected = text[: text.index(stops[0])]
    for place in range(len(text) + 1):
        matcher = StopMatcher(stops)
        shown, is_stopped = "", False
        for portion in (text[:place], text[place:]):
            if not is_stopped:
                step = matcher.feed(portion)
                shown, is_stopped = shown + step.text, step.stop is not None
        failure = None
        if shown != expected or not is_stopped:
            failure = f"stop strings {stops} in {text!r}, cut at {place}: shown {shown!r}"
        tally.add(failure=failure)


LAWS = (Law("text", "streamed text = whole text, at every split", _text),)
