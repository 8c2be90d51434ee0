"""The training loop: `python3 -m training.train --plan tenth --out FOLDER`.

In:  a plan; a folder to resume from or a model to start from, if any; a limit in minutes.
Out: in the folder: log.jsonl (a line per report: losses, measurements, tokens a second), and a
     checkpoint to resume from (checkpoint.py).
Every batch depends on (seed, stage, step) alone, so a resumed run sees the same text. Losses:
next token + 0.2 MTP + index divergence; the last reaches indexers only.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import checkpoint, losses, start
from training.data.mixture import Wish, batches
from training.graphs import StepGraphs
from training.measure import report
from training.model import Losses, Model
from training.muon import Optimiser, Rates
from training.parameters import Parameters, initial_parameters
from training.plans import PLANS, Plan, Stage
from training.selection import Choice
from training.shapes import CONFIGS, Shape

FIGURES = ("text", "mtp", "index", "right", "mtp_right")
MTP_WEIGHT = 0.2
BIAS_STEP = 1e-3
PROBE_ELEMENTS = 2**22  # rows to teach the indexer on, times their length


class Training:
    """A plan under way."""

    def __init__(self, plan: Plan, args: argparse.Namespace) -> None:
        self.plan, self.args = plan, args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.shape = Shape.of(CONFIGS[plan.shape])
        self.model = Model(self.shape, self.device, dtype)
        self.plain = Model(self.shape, self.device, dtype)  # for measuring: lengths of any kind
        self.params: Parameters = initial_parameters(self.shape, args.seed, self.device)
        rates = Rates(plan.matrix_rate, plan.other_rate, plan.index_rate)
        self.optimiser = Optimiser(self.params, rates)
        self.step, self.minutes = 0, 0.0
        self.began = time.monotonic()
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        if args.resume:
            place = checkpoint.load(Path(args.resume), self.params, self.optimiser.state)
            self.step, self.minutes = place["step"], place["minutes"]
            self.optimiser.num_steps = place["optimiser_steps"]
        elif args.start:
            start.fill(self.params, Path(args.start))
        if args.compile:
            if args.cache and Path(args.cache).exists():
                torch.compiler.load_cache_artifacts(Path(args.cache).read_bytes())
            self.model.compile(args.compile)
        self.graphs = StepGraphs(self.pure_step) if args.graphs else None

    @property
    def is_over_time(self) -> bool:
        """Whether the limit in minutes has passed."""
        return time.monotonic() - self.began > self.args.minutes * 60

    def run(self) -> None:
        """Train to the end of the plan or of the time; then measure and save."""
        before = 0
        for number, stage in enumerate(self.plan.stages):
            if self.step < before + stage.steps and not self.is_over_time:
                self._stage(number, stage, self.step - before)
            before += stage.steps
        self.save()

    def save(self) -> None:
        """Write the checkpoint; also after each measurement, for runs that are cut off.

        A finished plan needs the optimiser's state no more.
        """
        minutes = self.minutes + (time.monotonic() - self.began) / 60
        place = {
            "plan": self.args.plan, "step": self.step, "of": self.plan.num_steps,
            "optimiser_steps": self.optimiser.num_steps, "minutes": round(minutes, 2),
            "seed": self.args.seed,
        }  # fmt: skip
        state = self.optimiser.state if self.step < self.plan.num_steps else {}
        checkpoint.save(self.out, self.params, state, place)
        made = torch.compiler.save_cache_artifacts() if self.args.compile else None
        if made is not None:
            (self.out / "compiled.bin").write_bytes(made[0])

    def _stage(self, number: int, stage: Stage, done: int) -> None:
        seed = self.args.seed * 1000 + number
        wish = Wish(stage.lengths, self.plan.tokens, stage.steps, seed, stage.diet)
        since, at_report = time.monotonic(), self.step
        total = torch.zeros(len(FIGURES), device=self.device)
        feed = batches(wish, done, self.args.workers, self.device)
        for place, (ids, weight) in enumerate(feed, start=done):
            total += self.one_step(stage.is_sparse_at(place), ids, weight)
            self.step += 1
            is_last = self.step == self.plan.num_steps
            if self.step % self.args.report == 0 or is_last or self.is_over_time:
                steps = self.step - at_report
                means = (total / steps).tolist()
                speed = steps * ids.numel() / (time.monotonic() - since)
                figures = {name: round(v, 4) for name, v in zip(FIGURES, means, strict=True)}
                if self.step % self.args.measure == 0 or is_last:
                    figures |= self._measure(stage)
                    self.save()
                self._log({"stage": stage.name, "tokens_s": int(speed), **figures})
                since, at_report = time.monotonic(), self.step
                total.zero_()
            if self.is_over_time:
                break
        feed.close()

    def one_step(self, is_sparse: bool, ids: Tensor, weight: Tensor) -> Tensor:
        """Forward, backward, update; the step's FIGURES [5]."""
        self.optimiser.begin(self.plan.factor(self.step))
        if self.graphs is not None:
            return self.graphs.run(is_sparse, ids, weight)
        return self.pure_step(is_sparse, ids, weight)

    def pure_step(self, is_sparse: bool, ids: Tensor, weight: Tensor) -> Tensor:
        """The part of a step that only touches the device."""
        for value in self.params.values():
            value.grad = None  # a capture that failed may have left some
        count = max(4, min(ids.shape[1] // 8, PROBE_ELEMENTS // ids.numel()))
        picked = losses.pick_rows(weight, count)
        run = self.model.start(ids, Choice.EXACT if is_sparse else None, picked)
        found = self.model.losses(self.params, ids, weight, run)
        (found.text + MTP_WEIGHT * found.mtp + found.index).backward()
        losses.expert_loads_to_bias(self.params, run.loads, BIAS_STEP)
        self.optimiser.update(self.params)
        return _figures(found, weight)

    def _measure(self, stage: Stage) -> dict[str, float]:
        choice = Choice.EXACT if stage.is_sparse else None
        longest = max(stage.lengths)
        lengths = tuple(n for n in (256, 512, 1024, 2048, 4096) if n <= longest) or (longest,)
        family = self.plan.family
        return report(self.plain, self.params, lengths, self.args.count, choice, family)

    def _log(self, figures: dict[str, Any]) -> None:
        minutes = self.minutes + (time.monotonic() - self.began) / 60
        line = json.dumps({"step": self.step, "minutes": round(minutes, 2), **figures})
        print(line, flush=True)
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _figures(found: Losses, weight: Tensor) -> Tensor:
    """FIGURES: losses, and the shares of answer tokens that were guessed right."""
    asked = weight >= 1.0
    now, ahead = asked[:, 1:], asked[:, 2:]
    right = (found.right[:, :-1] & now).sum() / now.sum().clamp(min=1)
    mtp_right = (found.mtp_right[:, :-2] & ahead).sum() / ahead.sum().clamp(min=1)
    return torch.stack([found.text, found.mtp, found.index, right, mtp_right]).detach()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="tenth", choices=sorted(PLANS))
    parser.add_argument("--out", required=True, help="folder of log and checkpoint")
    parser.add_argument("--resume", help="folder of a checkpoint")
    parser.add_argument("--start", help="folder of a shipped model, to go on from its parameters")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="processes that write text")
    parser.add_argument("--report", type=int, default=50, help="steps between lines of the log")
    parser.add_argument("--measure", type=int, default=500, help="steps between measurements")
    parser.add_argument("--count", type=int, default=64, help="prompts of a measurement")
    parser.add_argument("--graphs", action="store_true", help="capture steps as CUDA graphs")
    parser.add_argument("--compile", help="torch.compile backend, as inductor; not given: none")
    parser.add_argument(
        "--cache", help="compiled.bin of an earlier run on the same kind of machine"
    )
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    Training(PLANS[args.plan], args).run()


if __name__ == "__main__":
    main()
