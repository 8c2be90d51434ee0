"""Where the memory of a GPU goes, computed before any of it is allocated.

In:  the model's config, the dtype, the limits of a step, a Machine, how many GPUs share the model.
Out: a MemoryPlan: weights, the largest step (its activations, index scores, logits), captured
     graphs, a reserve, and what is left for the cache, which is all the rest of the share of the
     GPU that may be used. Per rank: heads, experts and vocabulary divided, latents and index keys
     whole on each (design.md §8). ConfigError if nothing is left.
The counts are upper bounds by shape, of the widest layer; they are checked against an allocator in
tests/gpu. On a CPU nothing is planned here (resolve.py takes a share of the free memory).
Not here: pages (cache/budget.py), allocation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gnomon.attention.plan import Budget
from gnomon.engine.machine import GIB, Machine
from gnomon.errors import ConfigError
from gnomon.models.config import BlockFp8, ModelConfig
from gnomon.models.params import ParamSpec, param_dtype, param_specs
from gnomon.models.quantised import may_stay_fp8

DEFAULT_UTILIZATION = 0.9  # of a GPU's memory
RESERVE_BYTES = 1 * GIB  # CUDA's context and libraries, kernels' workspaces, fragments
GPU_BUDGET = Budget(score_bytes=512 << 20, context_rows=32768)
SAMPLING_BYTES = 44  # a logit of a row that is drawn: float32 twice, float64 and int64 twice each
SEGMENT_ROW_BYTES = 4096  # of a captured prefill row: rotations of every size, ids, slots
HEAD_ROWS = ("attn.q_b.", "attn.kv_b.")  # divided along their first axis
HEAD_COLUMNS = ("attn.o.",)  # along their last
SPLIT_INNER = ("mlp.", "shared.")  # gate_up along its first axis, down along its last
VOCABULARY = ("embed.", "lm_head.")


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One use of memory."""

    name: str
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step may hold. `max_len`: tokens of the longest request."""

    num_tokens: int
    num_seqs: int
    max_len: int
    has_graphs: bool = True
    graph_tokens: int = 0  # of the largest prefill step that is captured


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All of one GPU's memory that may be used, `limit_bytes`, line by line."""

    machine: Machine
    limit_bytes: int
    lines: tuple[MemoryLine, ...]

    @property
    def num_fixed(self) -> int:
        """Bytes that are not the cache's."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def cache_bytes(self) -> int:
        """Bytes left for the cache; negative where there is too little."""
        return self.limit_bytes - self.num_fixed

    def shown(self) -> list[str]:
        """The plan as lines of a table."""
        rows = [(line.name, line.num_bytes, line.why) for line in self.lines]
        rows.append(("cache", self.cache_bytes, "what is left"))
        of_gpu = f"of {self.machine.total_bytes / GIB:.1f} GiB on {self.machine.name}"
        rows.append(("in use, at most", self.limit_bytes, of_gpu))
        return [f"{name:<16}{size / GIB:9.2f} GiB  {why}" for name, size, why in rows]


def plan_memory(
    model: ModelConfig,
    dtype: torch.dtype,
    sizes: StepSizes,
    machine: Machine,
    utilization: float | None = None,
    weight_bytes: int | None = None,
    num_ranks: int = 1,
) -> MemoryPlan:
    """The plan of one rank. `weight_bytes`: None counts the published form (weight_bytes_of)."""
    weights = weight_bytes if weight_bytes is not None else weight_bytes_of(model, dtype, num_ranks)
    step = step_bytes(model, dtype, sizes, num_ranks)
    graphs = graph_bytes(model, dtype, sizes, num_ranks) if sizes.has_graphs else 0
    shared = f", one of {num_ranks} ranks" if num_ranks > 1 else ""
    others = machine.total_bytes - machine.free_bytes
    lines = (
        MemoryLine("others", others, "held by other processes when this one starts"),
        MemoryLine("weights", weights, f"{model.num_hidden_layers} layers{shared}"),
        MemoryLine("largest step", step, f"{sizes.num_tokens} tokens, {sizes.num_seqs} sampled"),
        MemoryLine("graphs", graphs, _graph_words(sizes)),
        MemoryLine("reserve", RESERVE_BYTES, "CUDA, libraries, fragments"),
    )
    share = DEFAULT_UTILIZATION if utilization is None else utilization
    return MemoryPlan(machine, int(machine.total_bytes * share), lines)


def require_room(plan: MemoryPlan) -> None:
    """ConfigError, with the whole table, if nothing is left for the cache."""
    if plan.cache_bytes <= 0:
        table = "\n  ".join(plan.shown())
        raise ConfigError(
            f"the model does not fit {plan.machine.name or 'this GPU'}: "
            f"{plan.num_fixed / GIB:.1f} GiB are needed beside the cache and "
            f"{plan.limit_bytes / GIB:.1f} GiB may be used.\n  {table}\nLower "
            "--max-num-batched-tokens or --max-num-seqs, raise --gpu-memory-utilization, or use "
            "more or larger GPUs (gnomon plan says how many)."
        )


def weight_bytes_of(
    model: ModelConfig, dtype: torch.dtype, num_ranks: int = 1, has_fp8: bool = True
) -> int:
    """Bytes of one rank's weights. ``has_fp8``: FP8 matrices of the checkpoint stay FP8."""
    block = model.quantization if has_fp8 else None
    return sum(_param_bytes(spec, dtype, block, num_ranks) for spec in param_specs(model))


def _param_bytes(
    spec: ParamSpec, dtype: torch.dtype, block: BlockFp8 | None, num_ranks: int
) -> int:
    *others, rows, columns = 1, *_rank_shape(spec, num_ranks)
    count = math.prod(others) * rows * columns
    if block is None or not may_stay_fp8(spec):
        return count * param_dtype(spec, dtype).itemsize
    blocks = -(-rows // block.block_rows) * -(-columns // block.block_columns)
    return count + 4 * math.prod(others) * blocks


def _rank_shape(spec: ParamSpec, num_ranks: int) -> tuple[int, ...]:
    """The largest shard of a parameter: heads, experts, inner columns and vocabulary divided."""
    first, *middle, last = spec.shape if len(spec.shape) > 1 else (*spec.shape, 1)
    name = spec.name
    is_down = ".down" in name and _has(name, SPLIT_INNER)
    if is_down or _has(name, HEAD_COLUMNS):
        last = -(-last // num_ranks)
    elif _has(name, (*HEAD_ROWS, *SPLIT_INNER, "experts.")) or name.startswith(VOCABULARY):
        first = -(-first // num_ranks)
    return (first, *middle, last)


def _has(name: str, parts: Sequence[str]) -> bool:
    return any(f".{part}" in name for part in parts)


def step_bytes(model: ModelConfig, dtype: torch.dtype, sizes: StepSizes, num_ranks: int) -> int:
    """Most that one eager step holds at once, weights and cache aside."""
    rows = _row_bytes(model, dtype, num_ranks) * sizes.num_tokens
    heads = -(-model.num_attention_heads // num_ranks)
    head = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    most_keys = min(GPU_BUDGET.context_rows, sizes.num_tokens + model.index_topk)
    context = most_keys * (heads * head + latent) * dtype.itemsize
    vocab = -(-model.vocab_size // num_ranks)
    logits = sizes.num_seqs * vocab * (SAMPLING_BYTES + dtype.itemsize)
    attention = rows + max(context, _score_bytes(sizes.num_tokens, sizes.max_len, model))
    return max(attention, logits)


def graph_bytes(model: ModelConfig, dtype: torch.dtype, sizes: StepSizes, num_ranks: int) -> int:
    """The memory pool of the captured steps, and their buffers.

    A captured prefill step holds no index scores and no context: attention runs outside.
    """
    heads = -(-model.num_attention_heads // num_ranks)
    head = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    asked = heads * head + model.index_n_heads * model.index_head_dim + model.hidden_size
    row = _row_bytes(model, dtype, num_ranks)
    prefill = sizes.graph_tokens * (row + asked * dtype.itemsize + SEGMENT_ROW_BYTES)
    rows = row * sizes.num_seqs + prefill
    logits = sizes.num_seqs * -(-model.vocab_size // num_ranks) * (8 + dtype.itemsize)
    tables = 8 * sizes.num_seqs * -(-sizes.max_len // 64)
    return rows + logits + tables + _score_bytes(sizes.num_seqs, sizes.max_len, model)


def _graph_words(sizes: StepSizes) -> str:
    if not sizes.has_graphs:
        return "none are captured"
    prefill = f"; prefill, up to {sizes.graph_tokens} tokens" if sizes.graph_tokens else ""
    return f"decode, up to {sizes.num_seqs} rows{prefill}; their buffers"


def _score_bytes(num_rows: int, max_len: int, model: ModelConfig) -> int:
    """Index scores held at once, and what a merge of two chunks copies: whatever the context."""
    if not 0 < model.index_topk < max_len:
        return 0
    return 2 * min(4 * num_rows * max_len, GPU_BUDGET.score_bytes)


def _row_bytes(model: ModelConfig, dtype: torch.dtype, num_ranks: int) -> int:
    """Bytes that a row takes in the widest part of a layer; the residual stream is always there."""
    heads = -(-model.num_attention_heads // num_ranks)
    qk = model.qk_nope_head_dim + model.qk_rope_head_dim
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    attention = heads * (2 * qk + 2 * model.kv_lora_rank + 2 * model.v_head_dim)
    attention += 2 * (model.q_lora_rank + latent + model.index_n_heads * model.index_head_dim)
    inner = -(-model.intermediate_size // num_ranks)
    chosen = model.num_experts_per_tok
    experts = chosen * (2 * model.hidden_size + 3 * model.moe_intermediate_size)
    widest = max(attention, 3 * inner, experts)
    lists = model.index_topk * (4 + 8)  # ids and slots
    return (6 * model.hidden_size + widest) * dtype.itemsize + lists
