"""What sampled checks cost: two engines over one model, with and without, in turns.

In:  a model spec, requests a round, tokens a request, pairs of rounds.
Out: CPU time of a round in both engines, and the cost of the checks in percent with the 95 %
     confidence interval over the pairs (Student's t). A round is the same requests from the empty
     cache, at least 256 steps, so that every layer has its turn. CPU time of the process, not wall
     time: other work on the machine delays both engines, and is not counted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

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


def play(core: EngineCore, num_requests: int, num_prompt: int, num_new: int) -> tuple[float, int]:
    """(CPU seconds, steps) of one round."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    before = core.stats().num_steps
    core.add(
        [
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[(31 * number + 7 * i) % 4000 + 1 for i in range(num_prompt)],
                params=params,
            )
            for number in range(num_requests)
        ]
    )
    start = time.process_time()
    while core.has_work:
        core.step()
    return time.process_time() - start, core.stats().num_steps - before


def main() -> None:
    """Print a line a pair, then the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:deepseek_v32")
    parser.add_argument("--level", default="sampled")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=12, choices=[n + 1 for n in T_975])
    given = parser.parse_args()
    torch.set_num_threads(1)
    plain, checked = engines(given.model, ("off", given.level))
    shape = given.requests, given.prompt, given.new
    for core in (plain, checked):
        play(core, *shape)
    costs = []
    for pair in range(given.pairs):
        order = (plain, checked) if pair % 2 == 0 else (checked, plain)
        seconds = {id(core): play(core, *shape) for core in order}
        (off, steps), (on, _) = seconds[id(plain)], seconds[id(checked)]
        costs.append(100.0 * (on / off - 1.0))
        print(f"pair {pair}: off {off:.3f} s, {given.level} {on:.3f} s, {steps} steps", flush=True)
    mean, deviation = statistics.mean(costs), statistics.stdev(costs)
    half = T_975[given.pairs - 1] * deviation / math.sqrt(given.pairs)
    stats = checked.stats()
    print(f"{given.model}: {stats.checks} checks in {stats.num_steps} steps")
    print(f"cost {mean:.2f} %, 95 % interval {mean - half:.2f} .. {mean + half:.2f} %")


if __name__ == "__main__":
    main()
