"""All captures of an engine: prefill first, which takes the most memory, then decode.

In:  what is decided (Survey), the loaded model, its pools, the rules of batches and graphs.
Out: StepGraphs. One recorder and one memory pool serve both: only one step runs at a time.
Not here: the captures themselves (prefill_graphs.py, graphs.py), who comes there (runner.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gnomon.attention.layouts.base import PagedPool
from gnomon.attention.ops.operators import Operators
from gnomon.engine.graphs import CudaRecorder, DecodeGraphs, GraphRules, Recorder
from gnomon.engine.prefill_graphs import PrefillGraphs
from gnomon.engine.runner import StepGraphs
from gnomon.models.sparse_mla_model import SparseMlaModel

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@dataclass(frozen=True, slots=True)
class Kind:
    """Steps of a kind: the operators that are captured, and their sizes."""

    ops: Operators
    rules: GraphRules


def capture_steps(
    model: SparseMlaModel,
    pools: Mapping[str, PagedPool],
    kinds: tuple[Kind | None, Kind | None],
    recorder: Recorder | None = None,
    progress: Progress | None = None,
) -> StepGraphs:
    """Capture ``kinds`` (decode, prefill); what is None there always runs eagerly.

    ``recorder``: None is CUDA's.
    """
    decode_kind, prefill_kind = kinds
    if decode_kind is None and prefill_kind is None:
        return StepGraphs()
    recorder, tell = recorder or CudaRecorder(), progress or (lambda *_: None)
    prefill = decode = None
    if prefill_kind is not None:
        prefill = PrefillGraphs(model, pools, prefill_kind.ops, prefill_kind.rules, recorder)
        prefill.capture(tell)
    if decode_kind is not None:
        decode = DecodeGraphs(model, pools, decode_kind.ops, decode_kind.rules, recorder)
        decode.capture(tell)
    return StepGraphs(decode, prefill)
