"""What scheduling one step costs, without a model.

In:  counts of running and queued requests. Out: JSON on stdout, and in the file named by --json:
median, 90th percentile and mean, in microseconds of this thread's processor time (so that busy
neighbours do not count), of `schedule`, `commit` and both together, for
    decode          256 requests run, each gains a token per step
    decode_long     the same with 16,384 tokens of context each
    mixed           the same while prompts stream in and requests end, prefix cache on
    queued_100 and queued_10000    decode with so many waiting; and the growth of median
                    and mean, measured in turns, the order changing every round
Not here: the model, the sampler, the batch builder.

    python bench/scheduler.py [--json docs/results/scheduler.json] [--steps 400]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gnomon.cache.pages import PagePool
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.engine.scheduler import Scheduler, SchedulerConfig

NUM_RUNNING = 256
PAGE = 64
CHUNK = 8192
Times = list[tuple[float, float]]  # (schedule, commit) of each step, seconds


def make_request(number: int, num_prompt: int, max_tokens: int) -> EngineRequest:
    draw = random.Random(number)
    return EngineRequest(
        request_id=f"request-{number}",
        prompt_token_ids=[draw.randrange(100_000) for _ in range(num_prompt)],
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def make_scheduler(num_prompt: int, max_tokens: int) -> Scheduler:
    """NUM_RUNNING requests, all past their prompts."""
    config = SchedulerConfig(
        max_model_len=num_prompt + max_tokens + 2000,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=CHUNK,
        max_queue=20_000,
    )
    num_pages = NUM_RUNNING * (-(-config.max_model_len // PAGE) + 2) + 1
    scheduler = Scheduler(config, PagePool({"tokens": (num_pages * 2, PAGE)}))
    for number in range(NUM_RUNNING):
        scheduler.add(make_request(number, num_prompt, max_tokens))
    while scheduler.num_waiting or scheduler.stats().step_tokens != NUM_RUNNING:
        run_step(scheduler)
    return scheduler


def run_step(scheduler: Scheduler) -> tuple[float, float]:
    start = time.thread_time()
    step = scheduler.schedule()
    scheduled = time.thread_time()
    sampled = {item.request_id: [5] for item in step.items if item.needs_sample}
    before = time.thread_time()
    scheduler.commit(step, sampled)
    return scheduled - start, time.thread_time() - before


def summary(times: Times) -> dict[str, float]:
    columns = {
        "schedule": [a for a, _ in times],
        "commit": [b for _, b in times],
        "step": [a + b for a, b in times],
    }
    found = {}
    for name, values in columns.items():
        found[f"{name}_us"] = round(statistics.median(values) * 1e6, 1)
        found[f"{name}_p90_us"] = round(statistics.quantiles(values, n=10)[-1] * 1e6, 1)
        found[f"{name}_mean_us"] = round(statistics.fmean(values) * 1e6, 1)
    return found


def decode(num_prompt: int, num_steps: int) -> Times:
    scheduler = make_scheduler(num_prompt, num_steps + 1000)
    return [run_step(scheduler) for _ in range(num_steps)]


def mixed(num_steps: int) -> Times:
    """Outputs of 64 tokens: about four requests end and four prompts of 512 start per step."""
    scheduler = make_scheduler(512, 64)
    numbers = itertools.count(NUM_RUNNING)
    times: Times = []
    for _ in range(num_steps):
        while scheduler.num_running + scheduler.num_waiting < NUM_RUNNING + 8:
            scheduler.add(make_request(next(numbers), 512, 64))
        times.append(run_step(scheduler))
    return times


def queued(num_steps: int) -> dict[str, object]:
    """Two like schedulers with different queues, stepped in turns on the same machine."""
    sizes = (100, 10_000)
    schedulers = {size: make_scheduler(64, num_steps + 1000) for size in sizes}
    for size, scheduler in schedulers.items():
        for number in range(size):
            scheduler.add(make_request(NUM_RUNNING + number, 64, num_steps))
    gc.collect()
    times: dict[int, Times] = {size: [] for size in sizes}
    for number in range(num_steps):
        for size in sizes if number % 2 else reversed(sizes):
            times[size].append(run_step(schedulers[size]))
    found: dict[str, object] = {f"queued_{size}": summary(times[size]) for size in sizes}
    medians = [statistics.median(a + b for a, b in times[size]) for size in sizes]
    means = [statistics.fmean(a + b for a, b in times[size]) for size in sizes]
    found["growth_of_median"] = round(medians[1] / medians[0] - 1, 4)
    found["growth_of_mean"] = round(means[1] / means[0] - 1, 4)
    return found


def cases(num_steps: int) -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    yield "decode", lambda: dict(summary(decode(512, num_steps)))
    yield "decode_long", lambda: dict(summary(decode(16_384, num_steps)))
    yield "mixed", lambda: dict(summary(mixed(num_steps)))
    yield "queue", lambda: queued(num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result to this file too")
    parser.add_argument("--steps", type=int, default=400, help="steps measured per case")
    arguments = parser.parse_args()
    result: dict[str, object] = {
        "running": NUM_RUNNING,
        "page_size": PAGE,
        "steps": arguments.steps,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
    }
    for name, run in cases(arguments.steps):
        result[name] = run()
        gc.collect()
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
