"""Measuring the exported model as users run it: gnomon's engine, greedy, bfloat16, on a CPU.

In:  a model folder; prompts of `data`, of the held-out kinds (keys, wordings, operands, functions).
Out: shares of right answers between 0 and 1. An answer is right if its tokens, end token included,
     are the expected ones; a tool call is looked at as text.
FAULTS: `topk 1` and `flipped rotation` by config override, `random lists` by a tap that replaces
     what the indexers chose; where layers share a list (FAULTS_OF), `wrong source`: they take that
     of the full layer before. With them the same prompts must fail, or the numbers would say
     nothing about attention.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon import LLM
from gnomon.attention.axes import RowAxis
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.ops.values import Selection
from gnomon.engine.runner import Taps
from gnomon.engine.sampling_params import SamplingParams
from gnomon.evaluate.engine_respondent import EngineRespondent
from gnomon.evaluate.needle import NeedleSettings, run_needle
from gnomon.evaluate.respondent import AskSettings
from training.data.arithmetic import problem
from training.data.recall import needle
from training.data.tools import task
from training.data.writing import DSML, Call, Episode, Family, chat, tokenizer
from training.shapes import EOS_ID, GLM_STOP_IDS

FAULTS = ("topk 1", "flipped rotation", "random lists")
FAULTS_OF: dict[Family, tuple[str, ...]] = {"dsv32": FAULTS, "glm": (*FAULTS, "wrong source")}
DENSE = {"index_topk": 8192}


class RandomLists:
    """A tap: every row attends as many keys as it would have, but any."""

    wants_margin = False

    def __init__(self, seed: int = 0) -> None:
        self._dice = torch.Generator().manual_seed(seed)

    def begin_step(self, rows: RowAxis, request_ids: Sequence[str]) -> None:
        """Nothing to remember."""

    def index(self, layer: int, selection: Selection) -> KeySet:
        """Random positions that each row may see, ascending."""
        keys = selection.keys
        own = keys.segments[0]
        assert isinstance(own, ListSegment)
        kv_len = keys.axis.kv_len[:, None].long()
        chance = torch.rand(len(kv_len), int(kv_len.max()), generator=self._dice)
        chance[torch.arange(chance.shape[1])[None] >= kv_len] = -1.0
        width = min(own.ids.shape[1], chance.shape[1])
        chosen = chance.topk(width, dim=1).indices
        last = torch.iinfo(torch.int64).max
        chosen[torch.arange(width)[None] >= own.count[:, None]] = last
        chosen = chosen.sort(dim=1).values
        ids = torch.full_like(own.ids, -1)
        ids[:, :width] = chosen.masked_fill(chosen == last, -1).to(ids.dtype)
        return KeySet(keys.axis, (ListSegment(own.part, Space.POSITION, ids, own.count),), None)

    def experts(self, layer: int, expert_ids: Tensor, margin: Tensor) -> Tensor:
        """The router's own choice."""
        return expert_ids


def open_served(folder: Path, fault: str | None = None, dense: bool = False) -> LLM:
    """The model in gnomon, with a fault put in, or attending everything."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    overrides: dict[str, Any] = DENSE if dense else {}
    if fault == "topk 1":
        overrides = {"index_topk": 1}
    if fault == "flipped rotation":
        overrides = {"indexer_rope_interleave": not config["indexer_rope_interleave"]}
    if fault == "wrong source":
        types = config["indexer_types"]
        types[types.index("shared") - 1] = "shared"
        overrides = {"indexer_types": types}
    llm = LLM(model=str(folder), device="cpu", num_kv_pages=600, hf_overrides=overrides)
    if fault == "random lists":
        llm.core.taps = Taps(selection=RandomLists())
    return llm


def family_of(folder: Path) -> Family:
    """The chat format that a model was trained for, which is its own family's."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "glm" if config["model_type"] == "glm_moe_dsa" else "dsv32"


def split(episode: Episode) -> tuple[list[int], list[int]]:
    """The prompt's ids and the expected answer's."""
    ids, weights = episode.tokens()
    start = int((weights >= 1.0).argmax())
    return ids[:start].tolist(), ids[start:].tolist()


def answers(llm: LLM, prompts: Sequence[list[int]], longest: int) -> list[list[int]]:
    """Greedy answers, end token included; either format's ends end them."""
    ends = (EOS_ID, *GLM_STOP_IDS)
    params = SamplingParams(temperature=0.0, max_tokens=longest, stop_token_ids=ends)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def share_right(llm: LLM, make: Callable[[random.Random], Episode], count: int, seed: str) -> float:
    """Share of `count` prompts that are answered exactly as expected."""
    dice = random.Random(seed)
    made = [split(make(dice)) for _ in range(count)]
    found = answers(llm, [prompt for prompt, _ in made], max(len(want) for _, want in made))
    hits = (got == want for got, (_, want) in zip(found, made, strict=True))
    return sum(hits) / count


def needle_share(
    llm: LLM, length: int, count: int, seed: str = "card", family: Family = "dsv32"
) -> float:
    """Recall at about `length` tokens; one fact or four in filler, at any depth."""
    return share_right(
        llm,
        lambda dice: needle(dice, length, family, dice.choice((1, 4)))[0],
        count,
        f"{seed} {length}",
    )


def eval_share(llm: LLM, samples: int = 4) -> float:
    """What `gnomon eval needle` prints in the end: its own words, 40 questions a sample."""
    ask = AskSettings()
    settings = NeedleSettings(samples=samples)
    return run_needle(EngineRespondent(llm, ask), settings, ask, lambda *_: None).score.share


def sums_share(
    llm: LLM, kind: str, count: int, thinks: bool = False, family: Family = "dsv32"
) -> float:
    """Sums or differences ("+", "-") or stories ("story") with held-out operands."""

    def make(dice: random.Random) -> Episode:
        while True:
            asked, answer, thoughts = problem(dice, held_out=True)
            is_story = len(asked) > 40
            if (kind == "story") == is_story and (is_story or f" {kind} " in thoughts):
                break
        talk = chat(family)
        talk.user([(asked, 0.0)])
        talk.answer(answer, thoughts if thinks else None)
        return talk.episode

    return share_right(llm, make, count, f"card sums {kind}")


def tool_share(llm: LLM, family: Family, count: int, what: str) -> float:
    """Share of calls that are "well formed", or "as expected" to the letter: whatever the tokens,
    the text is the one wanted."""
    dice = random.Random(f"card tools {family}")
    made = []
    for _ in range(count):
        tools, said, calls = task(dice, held_out=True)
        talk = chat(family, tools=tools)
        talk.user([(said, 0.0)])
        talk.answer("", calls=calls)
        made.append((tools, *split(talk.episode)))
    found = answers(llm, [prompt for _, prompt, _ in made], 200)
    right = 0
    for (tools, _, want), got in zip(made, found, strict=True):
        text, wanted, end = (
            tokenizer().decode(ids, skip_special_tokens=False) for ids in (got, want, want[-1:])
        )
        if what == "as expected":
            right += text == wanted
            continue
        right += text.endswith(end) and is_well_formed(text.removesuffix(end), family, tools)
    return right / count


def is_well_formed(text: str, family: Family, tools: Sequence[dict[str, Any]]) -> bool:
    """One block of calls in the wire format; known names and parameters, values of their types."""
    calls = _dsml(text) if family == "dsv32" else _glm(text)
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    return calls is not None and all(
        name in schemas and _fits(arguments, schemas[name], family) for name, arguments in calls
    )


def _fits(arguments: dict[str, Any], schema: dict[str, Any], family: Family) -> bool:
    types = {"string": str, "integer": int, "boolean": bool}
    for key, value in arguments.items():
        kind = schema["properties"].get(key, {}).get("type")
        if kind is None:
            return False
        if family == "glm" and kind != "string":
            try:
                value = json.loads(value)
            except ValueError:
                return False
        if not isinstance(value, types[kind]):
            return False
    return set(schema["required"]) <= set(arguments)


_INVOKE = re.compile(rf'<{DSML}invoke name="([^"]+)">\n(.*?)\n</{DSML}invoke>\n', re.DOTALL)
_PARAMETER = re.compile(
    rf'<{DSML}parameter name="([^"]+)" string="(true|false)">([^<]*)</{DSML}parameter>(?:\n|$)'
)
_BLOCK = re.compile(rf"\n\n<{DSML}function_calls>\n(.*)</{DSML}function_calls>", re.DOTALL)
_GLM_CALL = re.compile(r"<tool_call>([^<]+)((?:<arg_key>[^<]+</arg_key><arg_value>[^<]*"
                       r"</arg_value>)*)</tool_call>")  # fmt: skip
_GLM_PAIR = re.compile(r"<arg_key>([^<]+)</arg_key><arg_value>([^<]*)</arg_value>")


def _dsml(text: str) -> list[Call] | None:
    block = _BLOCK.fullmatch(text)
    if block is None or _INVOKE.sub("", block[1]):
        return None
    calls: list[Call] = []
    for name, inner in _INVOKE.findall(block[1]):
        if _PARAMETER.sub("", inner):
            return None
        arguments: dict[str, Any] = {}
        for key, is_text, value in _PARAMETER.findall(inner):
            try:
                arguments[key] = value if is_text == "true" else json.loads(value)
            except ValueError:
                return None
        calls.append((name, arguments))
    return calls or None


def _glm(text: str) -> list[Call] | None:
    if not text or _GLM_CALL.sub("", text):
        return None
    return [(name, dict(_GLM_PAIR.findall(pairs))) for name, pairs in _GLM_CALL.findall(text)]
