"""The kernels of a verification compiled side by side, before the first law, where there is a GPU.

In:  a Context. Out: nothing but compiled kernels: a few runs of the laws' prompts, whole, in chunks
     and in company, over each route, run dry (engine/compile_ahead.py). What they show is zeros and
     is thrown away.
Laws run eagerly, in steps of all sizes, and each size class has kernels of its own. Met one by one
they would take most of the time that a short verification has.
Not here: captured steps, which compile ahead themselves.
"""

from __future__ import annotations

import logging

import torch

from gnomon.engine.compile_ahead import compiling_ahead
from gnomon.verify.context import Arm, Context
from gnomon.verify.trace import Staging, drive

logger = logging.getLogger(__name__)

FEW_TOKENS = 3
ARRIVALS = 7  # steps between two requests of a company


def compile_first(context: Context) -> None:
    """Run dry what laws will run; nothing on a CPU."""
    if context.device != "cuda":
        return
    context.begin("compiling")
    half = max(1, context.config.index_topk // 2)
    arms = (
        Arm({"dense_route": "always_when_allowed"}),
        Arm({"dense_route": "never", "max_prefill_chunk": half}),
        Arm({"max_prefill_chunk": 7, "dense_route": "never"}),
    )
    requests = [
        context.request(str(number), prompt, max_tokens=FEW_TOKENS)
        for number, prompt in enumerate(context.engine_prompts())
    ]
    come_later = {one.request_id: ARRIVALS * place for place, one in enumerate(requests)}
    try:
        with compiling_ahead(torch.device("cuda")):
            for number, arm in enumerate(arms):
                for arrivals in ({}, come_later):
                    drive(context.engine(arm), requests, Staging(arrivals))
                context.step(number, len(arms))
    except Exception as error:  # what is wrong is found by the laws
        logger.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)
