"""The engine with the operators that this machine uses = the engine with the plain reference.

The reference provider computes every attention operator by loops in float64, through the same cache
layout. Where the cache rounds there is no peer in transformers, and this is the law in its place:
each kernel, in place, over whole runs of the model, with its selections and what it wrote.
On a GPU it is the engine on the CPU, with the torch provider, whose kernels are held to the loops
by the law of operators: the same weights, the same layouts, another device.
Prompts are few and short: loops are slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from gnomon.engine.messages import EngineRequest
from gnomon.engine.operators import BACKENDS
from gnomon.verify.context import Arm, Context
from gnomon.verify.law import Law, check_arm
from gnomon.verify.prompts import PromptRule, draw_prompts
from gnomon.verify.result import NotApplicableError, Tally
from gnomon.verify.trace import Replay, Staging, Trace

PROVIDER = "reference"
NUM_PROMPTS = 4
NUM_TOKENS = 4


def _test(context: Context) -> Tally:
    if context.settings.attention_provider == PROVIDER:
        raise NotApplicableError("the engine is the reference itself: --attention-provider says so")
    tally = context.tally()
    rule, topk = context.rule, context.config.index_topk
    short = PromptRule(rule.vocab_size, topk, rule.page_size, min(rule.longest, 4 * topk + 1))
    prompts = draw_prompts(short, NUM_PROMPTS, context.settings.seed, "reference")
    requests = [
        context.request(str(number), prompt, max_tokens=NUM_TOKENS)
        for number, prompt in enumerate(prompts)
    ]
    for number, request in enumerate(requests):
        context.step(number, len(requests))
        check_arm(tally, context.run(Arm(), [request]), partial(_run_slowly, context, request))
    return tally


def _run_slowly(context: Context, request: EngineRequest, replay: Replay) -> Mapping[str, Trace]:
    return context.run(_slow_arm(context), [request], Staging(replay=replay))


def _slow_arm(context: Context) -> Arm:
    """The reference here; the CPU's engine where this is a GPU, over the GPU's layouts."""
    flags: dict[str, object] = dict.fromkeys(BACKENDS, "auto")  # they go before the provider
    if context.device == "cpu":
        return Arm({**flags, "attention_provider": PROVIDER})
    resolved = context.survey().resolved
    flags |= {"device": "cpu", "attention_provider": "torch", "weights": "auto"}
    flags |= {"kv_layout": resolved.latent_layout.id, "index_layout": resolved.index_layout.id}
    return Arm(flags)


LAWS = (Law("reference", "every route = the plain reference, over the same cache layout", _test),)
