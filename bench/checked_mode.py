"""What sampled checks cost: two engines over one model, with and without, in lockstep.

In:  a model spec, requests a round, tokens a request, rounds.
Out: CPU time of a round in both engines, and the cost of the checks in percent with the 95 %
     confidence interval over the rounds (Student's t). A round is the same requests in both engines
     from the empty cache, at least 256 steps, so that every layer has its turn; the engines take
     their steps in turns, now the one first and now the other. CPU time of the process, not wall
     time: other work on the machine slows both engines alike, and is not counted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence

import torch

from gnomon.engine.assembly import put_together, survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.models.sources import open_model

T_975 = {5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 15: 2.131, 19: 2.093, 29: 2.045}


def engines(model: str, levels: tuple[str, ...]) -> list[EngineCore]:
    """One engine a level; the weights are loaded once."""
    cores, loaded = [], None
    for level in levels:
        config = EngineConfig.of(
            model=model, check=level, num_kv_pages=600, enable_prefix_caching=False
        )
        found = survey(config, 4096)
        if loaded is None:
            resolved = found.resolved
            loaded = open_model(
                found.source,
                resolved.dtype,
                resolved.device,
                lambda _: None,
                num_positions=resolved.max_model_len,
            )
        cores.append(EngineCore(put_together(found, loaded)))
    return cores


def requests(num_requests: int, num_prompt: int, num_new: int) -> list[EngineRequest]:
    """Greedy requests of different prompts that end by length alone."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[(31 * number + 7 * i) % 4000 + 1 for i in range(num_prompt)],
            params=params,
        )
        for number in range(num_requests)
    ]


def play(cores: Sequence[EngineCore], wanted: list[EngineRequest]) -> tuple[list[float], int]:
    """(CPU seconds of each engine, steps) of one round in lockstep."""
    for core in cores:
        core.add(wanted)
    seconds, steps = [0.0] * len(cores), 0
    while cores[0].has_work:
        order = range(len(cores)) if steps % 2 else range(len(cores) - 1, -1, -1)
        for place in order:
            start = time.process_time()
            cores[place].step()
            seconds[place] += time.process_time() - start
        steps += 1
    return seconds, steps


def main() -> None:
    """Print a line a round, then the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:deepseek_v32")
    parser.add_argument("--level", default="sampled")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12, choices=[n + 1 for n in T_975])
    given = parser.parse_args()
    torch.set_num_threads(1)
    cores = engines(given.model, ("off", given.level))
    wanted = requests(given.requests, given.prompt, given.new)
    play(cores, requests(given.requests, given.prompt, 8))
    costs = []
    for round_ in range(given.rounds):
        (off, on), steps = play(cores, wanted)
        costs.append(100.0 * (on / off - 1.0))
        print(
            f"round {round_}: off {off:.3f} s, {given.level} {on:.3f} s, {steps} steps", flush=True
        )
    mean, deviation = statistics.mean(costs), statistics.stdev(costs)
    half = T_975[given.rounds - 1] * deviation / math.sqrt(given.rounds)
    stats = cores[1].stats()
    print(f"{given.model}, requests: {given.requests}, calls checked: {stats.checks}")
    print(f"cost {mean:.2f} %, 95 % interval {mean - half:.2f} .. {mean + half:.2f} %")


if __name__ == "__main__":
    main()
