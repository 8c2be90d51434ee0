"""Small real models (T0, T2 of reference/bugs.md) and steps on them, without an engine.

In:  a family and config fields; requests as token lists; how many tokens each computes in a step.
Out: `Bench`: a model with its cache and operators. `Bench.step` builds geometry and plan and runs
     the real forward pass; it gives hidden rows by token, so that two ways of doing the same work
     can be compared. Computation is in float64 unless a test asks for less.
Not here: oracles (plain_model.py), engines (tests/engine/tiny_engine.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gnomon.attention.dispatch import OpNeed, bind_operators
from gnomon.attention.geometry import Geometry, RowTensor, build_geometry
from gnomon.attention.layouts import IndexKeyDims, LatentDims, PagedPool, choose_layout
from gnomon.attention.plan import Budget, plan_step
from gnomon.attention.providers import builtin_providers
from gnomon.attention.routes import DensePolicy, RoutePolicy
from gnomon.attention.step import AttentionStep
from gnomon.attention.taps import RecordingTap
from gnomon.attention.transforms import pad_rows
from gnomon.models.config import ModelConfig
from gnomon.models.random_model import random_params
from gnomon.models.registry import build_model
from gnomon.models.sources import parse_model_spec
from gnomon.models.sparse_mla_model import ForwardOutput, SparseMlaModel

Token = tuple[str, int]  # request, position
NUM_POSITIONS = 20_000  # of the rotary table
NEVER = RoutePolicy(DensePolicy.NEVER)

T0 = (
    "layers=3,dense_layers=1,hidden=64,heads=4,q_rank=32,kv_rank=32,nope_dim=16,rope_dim=8,"
    "v_dim=16,index_heads=16,index_dim=16,topk=8,experts=8,experts_per_token=2,vocab=128,"
    "intermediate_size=64,moe_intermediate_size=32,max_len=4096"
)
FAMILIES = {
    "T0": f"random:deepseek_v32,{T0},n_group=2,topk_group=1",
    # T2: layers that share the selection of an earlier one.
    "T2": f"random:glm_moe_dsa,{T0.replace('layers=3', 'layers=8')},pattern=FSSSFSSS",
}


def t0_spec(kind: str = "T0", **fields: Any) -> str:
    """The spec of a tiny model, other fields put in the place of its own."""
    name, *settings = FAMILIES[kind].split(",")
    merged = dict(setting.split("=") for setting in settings) | fields
    return ",".join([name, *(f"{key}={value}" for key, value in merged.items())])


@lru_cache(maxsize=16)
def tiny_model(spec: str, dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Tensor], Any]:
    """(config, parameters, model); read-only, hence shared by tests."""
    config = parse_model_spec(spec).config
    params = random_params(config, 0, dtype)
    return config, params, build_model(config, params, NUM_POSITIONS)


def token_list(length: int, salt: int = 0) -> list[int]:
    """Random token ids below 128, the same for the same salt."""
    return random.Random(1000 + salt).choices(range(128), k=length)


@dataclass
class Request:
    """A sequence and its pages. ``done``: tokens that are in the cache."""

    name: str
    tokens: list[int]
    pages: list[int]
    done: int = 0


@dataclass
class Bench:
    """A model with a cache of its own. ``pools`` may be replaced by those of a simulated rank."""

    kind: str = "T0"
    fields: Mapping[str, Any] = field(default_factory=dict)
    page_size: int = 4
    num_pages: int = 160
    kv_layout: str = "auto"
    dtype: torch.dtype = torch.float64
    provider: str = "torch"

    def __post_init__(self) -> None:
        spec = t0_spec(self.kind, **self.fields)
        self.config, self.params, self.model = tiny_model(spec, self.dtype)
        self.model: SparseMlaModel
        self.pools = self.new_pools()
        need = OpNeed(dtype=self.dtype, dims=self.config.attention_dims())
        self.ops = bind_operators(need, builtin_providers(), self.provider)[0]
        self.free = list(range(1, self.num_pages))
        random.Random(7).shuffle(self.free)
        self.names: list[str] = []
        self.num_steps = 0

    def new_pools(self) -> dict[str, PagedPool]:
        """A fresh cache: one pool a part, zeroed."""
        config = self.config
        latent = choose_layout(
            self.kv_layout, LatentDims(config.kv_lora_rank, config.qk_rope_head_dim), self.dtype
        )
        kind = self.kv_layout if self.kv_layout != "fp8_ds_mla" else "fp8"
        index = choose_layout(kind, IndexKeyDims(config.index_head_dim), self.dtype)
        pools = {}
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}"
            pools[f"{name}.latent"] = latent.allocate(self.num_pages, self.page_size)
            if config.has_indexer(layer):
                pools[f"{name}.index_key"] = index.allocate(self.num_pages, self.page_size)
        return pools

    def request(self, name: str, tokens: Sequence[int], room: int = 12) -> Request:
        """A request with shuffled pages for its tokens and ``room`` more."""
        need = -(-(len(tokens) + room) // self.page_size)
        return Request(name, list(tokens), [self.free.pop() for _ in range(need)])

    def geometry(self, work: Sequence[tuple[Request, int]]) -> Geometry:
        """The next ``n`` tokens of each request; does not move the requests on."""
        self.num_steps += 1
        return build_geometry(
            [n for _, n in work],
            [one.done + n for one, n in work],
            {"tokens": [one.pages for one, _ in work]},
            self.page_size,
            label=f"step {self.num_steps}",
        )

    def token_ids(self, geometry: Geometry, requests: Sequence[Request]) -> RowTensor:
        """The ids of the axis' own rows, looked up by (request, position); 0 for padding."""
        request, position = geometry.rows.host_rows()
        ids = [
            0 if b < 0 else requests[b].tokens[p]
            for b, p in zip(request.tolist(), position.tolist(), strict=True)
        ]
        return RowTensor(geometry.rows, torch.tensor(ids, dtype=torch.int64))

    def forward(
        self,
        geometry: Geometry,
        requests: Sequence[Request],
        policy: RoutePolicy = NEVER,
        budget: Budget | None = None,
        **parts: Any,
    ) -> ForwardOutput:
        """Plan and run a geometry; ``parts`` replace fields of the AttentionStep."""
        plan = plan_step(geometry, self.config.attention_dims(), budget=budget, policy=policy)
        step = AttentionStep(geometry, plan, self.pools, self.ops)
        step = replace(step, **parts)
        if step.tap is not None:
            step.tap.begin_step(geometry.rows, [one.name for one in requests])
        return self.model.forward(self.token_ids(geometry, requests), step)

    def step(
        self,
        work: Sequence[tuple[Request, int]],
        change: Callable[[Geometry], Geometry] | None = None,
        **options: Any,
    ) -> dict[Token, Tensor]:
        """Compute the next tokens; hidden row [D] of each. ``change``: a transformation."""
        geometry = self.geometry(work)
        geometry = change(geometry) if change else geometry
        requests = [one for one, _ in work]
        output = self.forward(geometry, requests, **options)
        for one, n in work:
            one.done += n
        return rows_by_token(output.hidden, requests)

    def prefill(self, requests: Sequence[Request], **options: Any) -> dict[Token, Tensor]:
        """All tokens that are left, in one step."""
        return self.step([(one, len(one.tokens) - one.done) for one in requests], **options)

    def logits(self, rows: Mapping[Token, Tensor]) -> Tensor:
        """[M, V] of hidden rows, in the order of the mapping."""
        return self.model.logits(torch.stack(list(rows.values())))

    def greedy(self, row: Tensor) -> int:
        """The token that a hidden row predicts."""
        return int(self.model.logits(row[None])[0].argmax())


def rows_by_token(value: RowTensor, requests: Sequence[Request]) -> dict[Token, Tensor]:
    """The live rows of a per-row value by (request name, position)."""
    request, position = value.axis.host_rows()
    live = value.axis.host_live_rows().tolist()
    return {(requests[request[r]].name, int(position[r])): value.data[r] for r in live}


def padded_to(num_rows: int) -> Callable[[Geometry], Geometry]:
    """A transformation that pads a step to ``num_rows`` rows."""
    return lambda geometry: pad_rows(geometry, num_rows)


def assert_same_rows(
    left: Mapping[Token, Tensor], right: Mapping[Token, Tensor], bound: float = 1e-9
) -> None:
    """Both hold the same tokens, and their rows differ by at most ``bound``."""
    assert left.keys() == right.keys()
    worst = max(float((left[t] - right[t]).abs().max()) for t in left)
    assert worst <= bound, f"rows differ by {worst}"


def selections(tap: RecordingTap) -> dict[tuple[int, str], list[set[int]]]:
    """(layer, request) -> the set of positions that each row selected."""
    return {
        key: [set(row[row >= 0].tolist()) for row in ids]
        for key, ids in tap.recording.index.items()
    }
