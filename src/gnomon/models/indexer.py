"""The lightning indexer of one layer: which keys each row shall attend.

In:  the layer's normed input h [R, D], the normalised query latent cq [R, rq], the step.
Out: what is written and asked (`entry`, `weigh`); by `select` a KeySet in POSITION space and the
     rows whose scores held a NaN, both on the axis of the SPARSE rows.
Maths: oracle_math.md §1.5. Index keys of the step's rows are written to the cache before any row
is scored, also where every row is so short that no scores are needed.
Not here: scoring and top-k (operator ``index_select``), reuse by later layers (the model).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gnomon.attention.geometry import RowTensor
from gnomon.attention.indices import KeySet
from gnomon.attention.ops.fusions import IndexEntry, index_products
from gnomon.attention.ops.values import IndexTransform
from gnomon.attention.step import AttentionStep
from gnomon.models.config import ModelConfig
from gnomon.models.linear import Linear, Param, SharedInput, WideLinear, tensor
from gnomon.models.rotation import Rotations

LAYER_NORM_EPS = 1e-6  # of the index keys in every release; not rms_norm_eps


@dataclass(frozen=True, slots=True, eq=False)
class IndexQuery:
    """What keys are chosen by, on one axis: queries [M, Hi, Di], prepared, and weights [M, Hi]."""

    query: RowTensor
    weights: RowTensor


@dataclass(frozen=True, slots=True, eq=False)
class Indexer:
    """Index weights of a layer that selects for itself."""

    layer: int
    part: str
    num_heads: int
    query: Linear  # [Hi * Di, rq]
    key: Linear  # [Di, D]
    head_weights: WideLinear  # [Hi, D]
    transform: IndexTransform

    @classmethod
    def of(cls, params: Mapping[str, Param], layer: int, config: ModelConfig) -> Indexer:
        """Take layer ``layer``'s index weights from ``params``."""
        prefix = f"layers.{layer}.indexer"
        norm_weight = tensor(params, f"{prefix}.k_norm.weight")
        return cls(
            layer=layer,
            part=index_part(layer),
            num_heads=config.index_n_heads,
            query=Linear.of(params, f"{prefix}.wq_b"),
            key=Linear.of(params, f"{prefix}.wk"),
            head_weights=WideLinear.of(params, f"{prefix}.weights_proj", norm_weight.dtype),
            transform=IndexTransform(
                norm_weight=norm_weight,
                norm_bias=tensor(params, f"{prefix}.k_norm.bias"),
                norm_eps=LAYER_NORM_EPS,
                has_hadamard=config.index_hadamard,
            ),
        )

    def entry(
        self, h: SharedInput, q_latent: SharedInput, rotations: Rotations, step: AttentionStep
    ) -> tuple[IndexEntry, Tensor | None]:
        """The index keys that the step's tokens write, and the queries of the SPARSE rows.

        With them their heads' weights [M, Hi], where one launch made them beside the keys.
        """
        geometry, sparse = step.geometry, step.plan.sparse
        latent: Tensor | SharedInput = q_latent
        if sparse is None:
            latent = q_latent.values[:0]
        elif sparse.rows is not None:
            latent = sparse.take(RowTensor(geometry.rows, q_latent.values)).data
        query = self.query(latent, step.ops).view(-1, self.num_heads, self.key.num_outputs)
        key, weights = self._key_and_weights(h, step)
        entry = IndexEntry(
            query=RowTensor(rotations.index_query.axis, query),
            key=step.on_write_axis(RowTensor(geometry.rows, key)),
            transform=self.transform,
            rope=(rotations.index_query, rotations.index_key),
            pool=step.pool(self.part),
            writes=geometry.writes["tokens"],
        )
        return entry, weights

    def _key_and_weights(self, h: SharedInput, step: AttentionStep) -> tuple[Tensor, Tensor | None]:
        """Raw keys [R, Di] of all rows; their heads' weights [R, Hi] too, if all are SPARSE."""
        sparse, weight, parts = step.plan.sparse, self.key.weight, self.head_weights.parts
        plain = weight if isinstance(weight, Tensor) else None  # FP8 keys: beside q_a and kv_a
        key = self.key(h, step.ops) if plain is None else None
        weights = None
        if sparse is not None and sparse.rows is None and parts is not None:
            made, weights = index_products(step.ops, h.values, plain, parts, self.num_heads)
            key = made if key is None else key
        return self.key(h, step.ops) if key is None else key, weights

    def weigh(
        self, h: SharedInput, query: RowTensor, weights: Tensor | None, step: AttentionStep
    ) -> IndexQuery:
        """``query`` [M, Hi, Di] of the SPARSE rows, prepared, with their heads' weights."""
        sparse = step.plan.sparse
        if weights is not None:
            return IndexQuery(query, RowTensor(query.axis, weights))
        if sparse is None:
            return IndexQuery(
                query, RowTensor(query.axis, query.data.new_empty(query.data.shape[:2]))
            )
        chosen_by = sparse.take(RowTensor(step.geometry.rows, h.values)).data
        return IndexQuery(query, RowTensor(sparse.axis, self.head_weights(chosen_by, step.ops)))

    def select(
        self, asked: IndexQuery, step: AttentionStep
    ) -> tuple[KeySet | None, RowTensor | None]:
        """Choose keys for the rows of the SPARSE route, whose keys are in the cache by now.

        ``asked``: on ``plan.sparse.axis``. Returns the key set and ``nan_rows`` (bool), both on
        the same axis; None where no row is SPARSE.
        """
        if step.plan.sparse is None:
            return None, None
        tap = step.tap
        selection = step.ops.index_select(
            asked.query,
            asked.weights,
            step.pool(self.part),
            step.geometry,
            step.plan,
            want_margin=tap is not None and tap.wants_margin,
        )
        keys = selection.keys if tap is None else tap.index(self.layer, selection)
        return keys, RowTensor(step.plan.sparse.axis, selection.nan_rows)


def index_part(layer: int) -> str:
    """Name of the cache part that holds a layer's index keys."""
    return f"layers.{layer}.index_key"
