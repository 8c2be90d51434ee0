"""Cache formats: each a named, versioned value that owns every access to its bytes."""

from __future__ import annotations

from gnomon.attention.layouts.base import HOST_OPERATIONS, KVLayout, Operation, PagedPool
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.layouts.plain import PlainLayout
from gnomon.attention.layouts.registry import IndexKeyDims, LatentDims, choose_layout

__all__ = [
    "HOST_OPERATIONS",
    "Fp8IndexKeyLayout",
    "Fp8LatentLayout",
    "IndexKeyDims",
    "KVLayout",
    "LatentDims",
    "Operation",
    "PagedPool",
    "PlainLayout",
    "choose_layout",
]
