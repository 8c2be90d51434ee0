"""Engines whose decode steps are captured, without CUDA, and a guard against waiting for a device.

`graph_core`: a tiny engine with static kernels; decode steps replay recorded work, or run eagerly.
`no_waiting`: while it is open, the ways in which the host reads a tensor raise, but for numpy(),
which a tensor on a GPU refuses itself and which pinned memory is filled by.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from gnomon.attention.indices import to_slots
from gnomon.attention.ops import attend
from gnomon.engine.assembly import Parts, put_together, survey
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import EngineCore
from gnomon.models.sources import open_model
from tests.engine.static_kernels import StaticRecorder, static_operators
from tests.engine.tiny_engine import MODEL, VOCAB

READERS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__")


def graph_parts(has_graphs: bool = True, captured_tokens: int = 0, **flags: Any) -> Parts:
    """The parts of a tiny engine in float64, at most 12 requests at once unless flags say else.

    `captured_tokens`: of the largest prefill step that is captured.
    """
    defaults = {
        "model": MODEL,
        "dtype": "float64",
        "num_kv_pages": 256,
        "block_size": 16,
        "max_num_seqs": 12,
    }
    found = survey(EngineConfig.of(**{**defaults, **flags}), VOCAB)
    resolved = found.resolved
    loaded = open_model(found.source, resolved.dtype, resolved.device, None, resolved.max_model_len)
    found = replace(found, ops=static_operators())
    recorder = StaticRecorder() if has_graphs else None
    return put_together(found, loaded, recorder=recorder, captured_tokens=captured_tokens)


def graph_core(has_graphs: bool = True, captured_tokens: int = 0, **flags: Any) -> EngineCore:
    """The engine of `graph_parts`."""
    return EngineCore(graph_parts(has_graphs, captured_tokens, **flags))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Reading a tensor raises; paths that are the CPU's own are those of a device."""

    def refuse(name: str) -> Any:
        def reading(self: torch.Tensor, *_: Any, **__: Any) -> Any:
            raise AssertionError(f"the host read a tensor {tuple(self.shape)} by {name}")

        return reading

    with pytest.MonkeyPatch.context() as patch:
        for name in READERS:
            patch.setattr(torch.Tensor, name, refuse(name))
        patch.setattr(torch.Tensor, "is_cpu", False)
        patch.setattr(attend, "to_slots", lambda *args: to_slots(*args, validate=False))
        yield
