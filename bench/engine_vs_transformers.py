"""Speed of the engine against transformers' generate: same machine, same run, same weights.

In:  families, repetitions, threads (the same for both sides).
Out: medians of wall-clock seconds of interleaved repetitions, as a table and as JSON.
Fair play: fp32, prompts are new in every repetition (no prefix is ever reused), transformers runs
with the attention and experts implementation that is faster for the model, with its cache and, for
mixed lengths, its own left-padded batch. One-by-one throughput is one pass over the 32 requests.
Not here: the server (server_overhead.py), quality (`gnomon verify`).

    python bench/engine_vs_transformers.py --json docs/results/bench_engine.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gnomon import LLM, SamplingParams
from gnomon.models.sources import parse_model_spec
from gnomon.verify.oracle import export_plain

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
NUM_NEW = 64
Prompts = list[list[int]]
Run = Callable[[Prompts, int], None]


def new_prompts(lengths: Sequence[int], vocab_size: int) -> Prompts:
    """Random token ids, never the same twice."""
    return [torch.randint(0, vocab_size, (length,)).tolist() for length in lengths]


def gnomon_run(folder: Path) -> Run:
    """Generate exactly n tokens for every prompt, all together."""
    llm = LLM(str(folder), tokenizer="none", dtype="float32", num_kv_pages=800)

    def run(prompts: Prompts, num_new: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        results = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == num_new for result in results)

    return run


def transformers_run(folder: Path, attention: str, experts: str) -> Run:
    """The same through one left-padded batch of transformers' generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=attention,
        experts_implementation=experts,
        local_files_only=True,
    ).eval()

    @torch.inference_mode()
    def run(prompts: Prompts, num_new: int) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == width + num_new

    return run


def seconds(run: Run, prompts: Prompts, num_new: int) -> float:
    """Wall-clock time of one call."""
    begin = time.perf_counter()
    run(prompts, num_new)
    return time.perf_counter() - begin


def faster(runs: dict[str, Run], vocab_size: int) -> str:
    """Which of transformers' settings decodes this model faster."""
    for run in runs.values():
        run(new_prompts([32], vocab_size), 2)
    taken = {
        name: min(seconds(run, new_prompts([256], vocab_size), 24) for _ in range(2))
        for name, run in runs.items()
    }
    return min(taken, key=lambda name: taken[name])


def measure(family: str, repetitions: int) -> dict[str, Any]:
    """All figures of one family; times in seconds."""
    source = parse_model_spec(f"random:{family}", default_vocab_size=512)
    vocab = source.config.vocab_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_plain(source, torch.float32, folder)
        ours = gnomon_run(folder)
        settings = {
            f"{attention}, {experts} experts": transformers_run(folder, attention, experts)
            for attention, experts in (
                ("eager", "grouped_mm"),
                ("sdpa", "grouped_mm"),
                ("eager", "eager"),
            )
        }
        best = faster(settings, vocab)
        sides = {"gnomon": ours, "transformers": settings[best]}
        cases = {
            "prefill 128": ([128], 1),
            "prefill 512": ([512], 1),
            "decode 64 after 128": ([128], NUM_NEW),
            "32 mixed 64-512, 64 new": ([64 + (i * 448) // 31 for i in range(32)], NUM_NEW),
            "32 equal 256, 64 new": ([256] * 32, NUM_NEW),
        }
        for run in sides.values():
            run(new_prompts([64, 100], vocab), 3)
        taken: dict[str, dict[str, list[float]]] = {c: {s: [] for s in sides} for c in cases}
        for _ in range(repetitions):
            for case, (lengths, num_new) in cases.items():
                for side, run in sides.items():
                    prompts = new_prompts(lengths, vocab)
                    taken[case][side].append(seconds(run, prompts, num_new))
        mixed, num_new = cases["32 mixed 64-512, 64 new"]
        single = sum(
            seconds(sides["transformers"], new_prompts([n], vocab), num_new) for n in mixed
        )
    medians = {c: {s: statistics.median(t) for s, t in by.items()} for c, by in taken.items()}
    for by in medians.values():
        by["ratio"] = by["transformers"] / by["gnomon"]
    one = medians["32 mixed 64-512, 64 new"]
    medians["32 mixed, one by one"] = {
        "gnomon": one["gnomon"],
        "transformers": single,
        "ratio": single / one["gnomon"],
    }
    return {"transformers_settings": best, "medians_s": medians, "all_s": taken}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from transformers import __version__ as transformers_version
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python bench/engine_vs_transformers.py --threads {options.threads} "
        f"--repetitions {options.repetitions}",
        "machine": f"{platform.machine()}, {options.threads} threads, {platform.platform()}",
        "torch": torch.__version__,
        "transformers": transformers_version,
        "dtype": "float32",
        "families": {},
    }
    for family in options.families:
        figures = result["families"][family] = measure(family, options.repetitions)
        print(f"\n{family} (transformers: {figures['transformers_settings']})")
        for case, by in figures["medians_s"].items():
            print(
                f"  {case:26} gnomon {by['gnomon']:8.3f} s   transformers "
                f"{by['transformers']:8.3f} s   {by['ratio']:5.2f} x"
            )
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
