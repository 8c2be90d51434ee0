"""Measuring a model in training: exact answers to held-out questions, sound and spoilt choice.

In:  parameters, a model, prompts of `data` (fresh dice, held-out keys, wordings, operands, names).
Out: shares between 0 and 1. An answer counts if every one of its tokens is the best guess after the
     right ones before it, which is the same as greedy decoding getting it right.
Run: `python3 -m training.measure --from CHECKPOINT [--count 128]` prints everything, faults too.
Not here: measuring the exported model, which gnomon does itself (export, card).
"""

from __future__ import annotations

import argparse
import json
import random
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from training import checkpoint
from training.data.arithmetic import problem
from training.data.recall import needle
from training.data.tools import task
from training.data.writing import Episode, Family, chat
from training.model import Model
from training.parameters import Parameters, initial_parameters
from training.plans import PLANS
from training.selection import Choice
from training.shapes import CONFIGS, PAD_ID, Shape

Batch = tuple[np.ndarray, np.ndarray]  # ids and weights [rows, length]


def ask_needle(dice: random.Random, length: int, family: Family) -> Episode:
    """A prompt of about `length` tokens, with one fact or four (two if it is short)."""
    return needle(dice, length, family, dice.choice((1, 4 if length > 128 else 2)))[0]


def ask_near(dice: random.Random, length: int, family: Family) -> Episode:
    """Five facts (two in a short text), and half of the filler names a part of one's key."""
    return needle(dice, length, family, 5 if length > 128 else 2, nearness=0.5)[0]


def ask_sum(dice: random.Random, length: int, family: Family) -> Episode:
    """One problem with held-out operands."""
    asked, answer, _ = problem(dice, held_out=True)
    talk = chat(family)
    talk.user([(asked, 0.0)])
    talk.answer(answer)
    return talk.episode


def ask_tool(dice: random.Random, length: int, family: Family) -> Episode:
    """A request for functions of held-out names, in either format."""
    tools, said, calls = task(dice, held_out=True)
    talk = chat("dsv32" if dice.random() < 0.5 else "glm", tools=tools)
    talk.user([(said, 0.0)])
    talk.answer("", calls=calls)
    return talk.episode


MAKERS = {"needle": ask_needle, "near": ask_near, "sums": ask_sum, "tools": ask_tool}


@lru_cache(maxsize=32)
def prompts(
    kind: str, count: int, rows: int, length: int, family: Family = "dsv32"
) -> tuple[Batch, ...]:
    """Episodes padded to one length; always the same ones."""
    dice = random.Random(f"measure {kind} {length}")
    found: list[Batch] = []
    for start in range(0, count, rows):
        ids = np.full((rows, length), PAD_ID, np.int64)
        weights = np.zeros((rows, length), np.float32)
        for place in range(min(rows, count - start)):
            made, weight = MAKERS[kind](dice, length, family).tokens()
            ids[place, : len(made)] = made[:length]
            weights[place, : len(made)] = weight[:length]
        found.append((ids, weights))
    return tuple(found)


@torch.no_grad()
def exact(
    model: Model, params: Parameters, kind: str, choice: Choice | None,
    size: tuple[int, int, int], family: Family = "dsv32",
) -> tuple[float, float]:  # fmt: skip
    """Share of right answers, and how often the MTP layer's first guess agrees with the model.

    `size`: number of prompts, prompts a batch, tokens a prompt. Agreement is counted over the
    tokens of answers.
    """
    right = total = agreed = drafted = 0
    for ids_, weights_ in prompts(kind, *size, family):
        ids = torch.from_numpy(ids_).to(model.device)
        asked = torch.from_numpy(weights_).to(model.device) >= 1.0
        run = model.start(ids, choice)
        hidden = model.hidden(params, ids, run)
        ahead = model.mtp_hidden(params, ids, hidden, run)
        head = params["lm_head.weight"].to(model.dtype)
        guess, draft = (
            torch.cat([(part.to(model.dtype) @ head.T).argmax(-1) for part in rows_.split(8192)])
            .view_as(ids)
            for rows_ in (hidden, ahead)
        )  # fmt: skip
        is_wrong = asked[:, 1:] & (guess[:, :-1] != ids[:, 1:])
        is_prompt = asked.any(1)
        right += int((is_prompt & ~is_wrong.any(1)).sum())
        total += int(is_prompt.sum())
        # the draft of row t and the model's own guess of row t + 1 are both of token t + 2
        counted = asked[:, 2:]
        agreed += int(((draft[:, :-2] == guess[:, 1:-1]) & counted).sum())
        drafted += int(counted.sum())
    return right / max(total, 1), agreed / max(drafted, 1)


def report(
    model: Model, params: Parameters, lengths: tuple[int, ...], count: int, choice: Choice | None,
    family: Family = "dsv32", with_faults: bool = False,
) -> dict[str, float]:  # fmt: skip
    """All measurements, named; of a sparse model what it recalls by dense attention, too."""
    found: dict[str, float] = {}
    drafts = []
    for length in lengths:
        rows = max(1, min(count, 32768 // length))
        size = (count, rows, length)
        found[f"needle {length}"], draft = exact(model, params, "needle", choice, size, family)
        drafts.append(draft)
        for fault in (Choice.RANDOM, Choice.FLIPPED, Choice.ONE) if with_faults else ():
            found[f"needle {length} {fault}"], _ = exact(
                model, params, "needle", fault, size, family
            )
        found[f"near {length}"], _ = exact(model, params, "near", choice, size, family)
        for kind in ("needle", "near") if choice is not None else ():
            found[f"{kind} {length} dense"], _ = exact(model, params, kind, None, size, family)
    found["mtp needle"] = float(np.mean(drafts))
    size = (4 * count, 256, 64)
    found["sums"], found["mtp sums"] = exact(model, params, "sums", choice, size, family)
    if max(lengths) >= 1024:
        size = (count, 32, 1024)
        found["tools"], found["mtp tools"] = exact(model, params, "tools", choice, size, family)
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    """Measure a checkpoint at all lengths, with and without faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--count", type=int, default=128)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = json.loads((args.source / "progress.json").read_text(encoding="utf-8"))
    plan = PLANS[place["plan"]]
    shape = Shape.of(CONFIGS[plan.shape])
    params = initial_parameters(shape, 0, device)
    checkpoint.load(args.source, params, None)
    model = Model(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    lengths = (512, 1024, 2048, 4096)
    found = report(model, params, lengths, args.count, Choice.EXACT, plan.family, with_faults=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
