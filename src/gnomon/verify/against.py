"""The engine here against any running server, by tokens and log-probabilities.

In:  a Context, an arm (the engine here), a CompletionServer, a tolerance.
Out: PromptResults, prompt by prompt, as of two arms.
The server continues a prompt greedily; the engine here runs over the prompt and the server's own
tokens (teacher-forced), so that each row is compared on the same past and one other token costs
nothing behind it. Compared are the log-probability of every token of the answer, and of the prompt
where the server tells them; and the greedy choice at every row of the answer. Another choice is a
tie where the engine here gives both tokens nearly the same logit (WIDEST tolerances).
The tolerance is for the root mean square of the log-probabilities' differences of a prompt, at
logits of standard deviation 1. Nobody can replay a server's selections: where it computes in other
precision it attends another key now and then, and that row is far off (WIDEST tolerances) though
nothing is wrong; MAX_FAR_SHARE of a prompt's rows may be, and are told as ties. DEFAULT_TOLERANCE
has room for bfloat16 and FP8; a server that computes in float32, as gnomon does here, is within
1e-4.
Not here: HTTP (against_server.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.frontend.language import language_of
from gnomon.text.tokenizer import Tokenizer
from gnomon.verify.against_server import CompletionServer, Question, Scored
from gnomon.verify.arms import NUM_PROMPTS, Outcome, PromptResult
from gnomon.verify.context import Arm, Context
from gnomon.verify.prompts import draw_lengths, draw_prompt
from gnomon.verify.roughness import WIDEST
from gnomon.verify.trace import drive

DEFAULT_TOLERANCE = 0.15
MAX_FAR_SHARE = 0.02  # of the rows of a prompt; one is always allowed
SENTENCES = (
    "The shadow of the pin fell across the seventh line an hour before noon.",
    "A carpenter lays the square against the beam and looks for light beneath it.",
    "Nobody in the village could say who had cut the numbers into the stone.",
    "In winter the shortest shadow is longer than the longest one in June.",
    "She measured the angle twice, wrote both values down, and trusted neither.",
    "Clouds came up from the sea, and for three days the dial told nothing.",
    "Ships that kept better clocks were wrecked less often on those rocks.",
    "If the plate is not level, every hour of the day is wrong by its own amount.",
    "The apprentice asked why noon on the dial and noon by the bell were not the same.",
    "Four weights hang from the frame: 12, 19, 33 and 64 pounds.",
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One prompt as both sides saw it: log-probabilities of tokens[first:], and greedy choices."""

    theirs: Tensor  # [n] float64, NaN where the server tells none
    ours: Tensor  # [n]
    gap: Tensor  # [n] of our logits: from the best token to theirs
    num_prompt_rows: int  # of the n, those whose token the prompt has chosen


def compare_with_server(
    context: Context, arm: Arm, server: CompletionServer, tolerance: float | None = None
) -> list[PromptResult]:
    """Put the prompts to the server, run over its answers here, compare."""
    context.begin("against")
    tokenizer = tokenizer_of(context)
    limit = DEFAULT_TOLERANCE if tolerance is None else tolerance
    questions = draw_questions(context, tokenizer, server.max_model_len)
    found = []
    for number, question in enumerate(questions):
        scored = server.score(question)
        answer = _check_answer(context, question, scored, tokenizer)
        seen = _run_here(context, arm, question, scored, answer)
        found.append(_judged(number, question, seen, limit))
        context.step(number + 1, len(questions))
    return found


def tokenizer_of(context: Context) -> Tokenizer | None:
    """The model's tokenizer, None where it has none or a smaller vocabulary."""
    language = language_of(context.survey().resolved.given)
    if language is None or language.tokenizer.vocab_size > context.config.vocab_size:
        return None
    return language.tokenizer


def draw_questions(
    context: Context, tokenizer: Tokenizer | None, max_model_len: int | None
) -> list[Question]:
    """Prompts of sentences, of about the lengths that the laws take; of ids without a tokenizer."""
    num_new = context.sizes.max_tokens
    room = context.longest if max_model_len is None else max_model_len - num_new
    if room < 1:
        raise ConfigError(
            f"the server holds {max_model_len} tokens, no more than --max-tokens {num_new}: lower "
            "the latter"
        )
    count = context.settings.prompts or NUM_PROMPTS
    rng = random.Random(f"{context.settings.seed}:against")
    questions = []
    for length in draw_lengths(context.rule, count, rng):
        length = min(length, room)
        if tokenizer is None:
            ids = draw_prompt(context.rule, length, rng)
            questions.append(Question(ids, None, num_new))
        else:
            questions.append(_text_question(tokenizer, length, num_new, rng))
    return questions


def _text_question(tokenizer: Tokenizer, length: int, num_new: int, rng: random.Random) -> Question:
    """Words of random sentences, as many as `length` tokens hold; at least one word."""
    words: list[str] = []
    while len(words) < length:
        words += rng.choice(SENTENCES).split()
    low, high = 1, len(words)
    while low < high:  # the most words that fit
        middle = (low + high + 1) // 2
        ids = tokenizer.encode_with_specials(" ".join(words[:middle]))
        low, high = (middle, high) if len(ids) <= length else (low, middle - 1)
    text = " ".join(words[:low])
    return Question(tuple(tokenizer.encode_with_specials(text)), text, num_new)


def _check_answer(
    context: Context, question: Question, scored: Scored, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The token ids of the answer, up to a token whose text does not say which one it is.

    ConfigError where the two sides do not speak of the same.
    """
    hint = "The server has another tokenizer or vocabulary: is it the same model?"
    if scored.num_prompt_tokens not in (None, len(question.token_ids)):
        raise ConfigError(
            f"a prompt of {len(question.token_ids)} tokens has {scored.num_prompt_tokens} on the "
            f"server. {hint}"
        )
    ids = _ids_of(scored, tokenizer)
    for index, token in zip(ids, scored.output, strict=False):
        if not 0 <= index < context.config.vocab_size:
            raise ConfigError(
                f"the server's token {token.text!r} (id {token.token_id}) is none of the "
                f"{context.config.vocab_size} here. {hint}"
            )
    here = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in here + scored.text and here not in scored.text:
        raise ConfigError(
            f"the server reads its tokens {ids[:8]} as {scored.text!r:.80}, here they are "
            f"{here!r:.80}. {hint}"
        )
    return tuple(ids)


def _ids_of(scored: Scored, tokenizer: Tokenizer | None) -> list[int]:
    """Ids as the server tells them, else by their texts; -1 for a text that no token has."""
    told = [token.token_id for token in scored.output if token.token_id is not None]
    if len(told) == len(scored.output):
        return told
    if tokenizer is None:
        raise ConfigError(
            "the server tells no token ids, and there is no tokenizer here to read its texts by: "
            "put tokenizer.json into the model's folder"
        )
    by_text: dict[str, list[int]] = {}
    for index in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(index).decode("utf-8", errors="replace")
        by_text.setdefault(text, []).append(index)
    ids = []
    for token in scored.output:
        found = by_text.get(token.text, [-1])
        if len(found) > 1:
            break  # half a character, say
        ids.append(found[0])
    return ids


def _run_here(
    context: Context, arm: Arm, question: Question, scored: Scored, answer: Sequence[int]
) -> Seen:
    """The engine here over prompt and answer."""
    tokens = (*question.token_ids, *answer)
    request = context.request("here", tokens, max_tokens=1)
    logits = drive(context.engine(arm), [request])["here"].logits[: len(tokens) - 1].double()
    chosen = torch.tensor(tokens[1:])[:, None]
    scale = max(1.0, float(logits.std()))
    own = logits.gather(-1, chosen)[:, 0]
    theirs = [*scored.prompt[1:]]
    theirs += [None] * (len(question.token_ids) - 1 - len(theirs))
    theirs = theirs[: len(question.token_ids) - 1] + [
        token.logprob for token in scored.output[: len(answer)]
    ]
    return Seen(
        theirs=torch.tensor([math.nan if x is None else x for x in theirs]).double() / scale,
        ours=(own - logits.logsumexp(-1)) / scale,
        gap=(logits.amax(-1) - own) / scale,
        num_prompt_rows=len(question.token_ids) - 1,
    )


def _judged(number: int, question: Question, seen: Seen, limit: float) -> PromptResult:
    is_known = ~seen.theirs.isnan()
    off = torch.where(is_known, (seen.ours - seen.theirs).abs(), 0.0).nan_to_num(nan=math.inf)
    rms = float(off[is_known].square().mean().sqrt()) if bool(is_known.any()) else 0.0
    is_answer = torch.arange(len(off)) >= seen.num_prompt_rows
    is_other = is_answer & (seen.gap > 0)
    is_far = (off > WIDEST * limit) | (is_other & (seen.gap > WIDEST * limit))
    num_far = int(is_far.sum())
    marked = is_far if num_far else is_other
    outcome = Outcome.TIE if bool(marked.any()) else Outcome.EQUAL
    if not rms <= limit or num_far > max(1, MAX_FAR_SHARE * len(off)):
        outcome = Outcome.DIFFERS
        marked = marked | (off >= off.max())
    rows = marked.nonzero()[:, 0]
    row = int(rows[0]) if len(rows) else None
    detail = ""
    if row is not None:
        detail = (
            f"log-probabilities off by {rms:.3g} (allowed {limit:.3g}), at position {row} by "
            f"{float(off[row]):.3g}; {num_far} of {len(off)} rows far off"
        )
        if bool(is_other[row]):
            detail += f"; another greedy token, {float(seen.gap[row]):.3g} below the best one here"
    return PromptResult(
        number=number,
        num_prompt=len(question.token_ids),
        num_compared=int(is_known.sum()),
        outcome=outcome,
        worst=rms,
        position=row,
        margin=None if row is None or not bool(is_other[row]) else float(seen.gap[row]),
        detail=detail,
    )
