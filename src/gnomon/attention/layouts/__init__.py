"""Cache formats: each a named, versioned value that owns every access to its bytes."""

from __future__ import annotations

from gnomon.attention.layouts.base import HOST_OPERATIONS, KVLayout, Operation, PagedPool
from gnomon.attention.layouts.plain import PlainLayout

__all__ = ["HOST_OPERATIONS", "KVLayout", "Operation", "PagedPool", "PlainLayout"]
