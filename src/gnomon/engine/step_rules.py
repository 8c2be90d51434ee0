"""What is the same for every step of an engine: rules of batches, graphs and the scheduler.

In:  the resolved configuration, the model's dims, who runs which operator.
Out: BatchRules, GraphRules, SchedulerConfig. Not here: the values (resolve.py, memory_plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gnomon.attention.checked import CheckLevel
from gnomon.attention.decode_plan import decode_buckets
from gnomon.attention.dispatch import Choice
from gnomon.attention.plan import Budget, Capabilities
from gnomon.attention.routes import AttentionDims, DensePolicy, RoutePolicy
from gnomon.attention.segment_plan import segment_buckets
from gnomon.engine.batch import BatchRules
from gnomon.engine.config import EngineConfig
from gnomon.engine.graphs import GraphRules
from gnomon.engine.memory_plan import GPU_BUDGET
from gnomon.engine.resolve import ResolvedConfig
from gnomon.engine.schedule_config import SchedulerConfig
from gnomon.errors import ConfigError

FIXED_ROW_MULTIPLE = 16  # see batch.py
MIN_DENSE_ROWS = 256  # on a GPU: six launches a layer and request, against none
MATERIALISING = ("reference", "torch")


def batch_rules(
    resolved: ResolvedConfig, dims: AttentionDims, choices: Sequence[Choice], has_graphs: bool
) -> BatchRules:
    """The rules of a configuration."""
    config = resolved.given
    # A GPU's fixed products need no padding, a CPU's do.
    is_padded = config.deterministic and resolved.device.type == "cpu"
    multiple = FIXED_ROW_MULTIPLE if is_padded else 1
    min_rows = MIN_DENSE_ROWS if resolved.device.type == "cuda" else 0
    return BatchRules(
        dims=dims,
        page_size=config.block_size,
        device=resolved.device,
        row_multiple=multiple,
        graph_rows=decode_buckets(resolved.max_num_seqs, multiple) if has_graphs else (),
        capabilities=capabilities_of(choices),
        budget=GPU_BUDGET if resolved.device.type == "cuda" else Budget(),
        policy=RoutePolicy(dense_policy(config), min_dense_rows=min_rows),
    )


def dense_policy(config: EngineConfig) -> DensePolicy:
    """The dense route's: by the flag; never in deterministic runs, whose chunks may not differ."""
    return DensePolicy.NEVER if config.deterministic else DensePolicy(config.dense_route)


def with_overrides(rules: BatchRules, rows: int | None, budget: Budget | None) -> BatchRules:
    """The rules with another multiple of rows or another budget, which change no answer."""
    if rows is not None:
        most = rules.graph_rows[-1] if rules.graph_rows else 0
        graph_rows = decode_buckets(most, rows) if most else ()
        rules = replace(rules, row_multiple=rows, graph_rows=graph_rows)
    return rules if budget is None else replace(rules, budget=budget)


def graph_rules(rules: BatchRules, max_len: int, groups: Sequence[str]) -> GraphRules:
    """The rules of the captured decode steps of these batches."""
    return GraphRules(
        dims=rules.dims,
        buckets=rules.graph_rows,
        max_len=max_len,
        page_size=rules.page_size,
        groups=tuple(groups),
        device=rules.device,
        capabilities=rules.capabilities,
        budget=rules.budget,
    )


def prefill_graph_rules(sizes: GraphRules, rules: BatchRules, most: int) -> GraphRules | None:
    """The rules of captured prefill steps of up to ``most`` rows; None: none is captured."""
    buckets = segment_buckets(most, rules.row_multiple)
    return replace(sizes, buckets=buckets) if buckets else None


def scheduler_config(resolved: ResolvedConfig) -> SchedulerConfig:
    """The rules of the scheduler."""
    config = resolved.given
    return SchedulerConfig(
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk or 0,
        policy="priority" if config.scheduling_policy == "priority" else "fcfs",
        # A burst waits in whole until the next step seats it; who may be in flight may wait.
        max_queue=resolved.max_num_seqs + config.max_queue_size,
        enable_prefix_cache=config.enable_prefix_caching,
    )


def overlaps(resolved: ResolvedConfig) -> bool:
    """Whether steps overlap: by the flag, and not where each step is looked at before the next."""
    config = resolved.given
    is_wished = config.overlap == "on"
    is_wished |= config.overlap == "auto" and resolved.device.type == "cuda"
    return is_wished and not _watchers(resolved)


def require_overlap(resolved: ResolvedConfig) -> None:
    """ConfigError, before weights are read, if steps shall overlap and cannot."""
    watchers = _watchers(resolved)
    if resolved.given.overlap == "on" and watchers:
        names = " and ".join(watchers)
        raise ConfigError(
            f"overlap is 'on', but with {names} each step is looked at before the next one begins. "
            f"Leave overlap out, or {names}."
        )


def _watchers(resolved: ResolvedConfig) -> list[str]:
    """The flags that look at every step, or at some, before the next one begins."""
    config = resolved.given
    claims = {
        "record": config.record is not None,
        "shadow": config.shadow > 0,
        "check": resolved.check is not CheckLevel.OFF,
    }
    return [name for name, is_on in claims.items() if is_on]


def capabilities_of(choices: Sequence[Choice]) -> Capabilities:
    """What the chosen kernels hold in memory: those in plain torch hold every step of the maths."""
    held = {choice.op for choice in choices if choice.provider.name in MATERIALISING}
    return Capabilities(
        holds_head_scores=bool(held & {"index_scores", "index_scores_paged"}),
        holds_paged_keys="index_scores_paged" in held,
        holds_dense_scores="dense_mha" in held,
        has_fixed_width="topk" not in held,
    )
