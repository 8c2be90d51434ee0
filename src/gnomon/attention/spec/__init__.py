"""Specifications of all operators, and the check of a provider against them.

``SPECS[name]`` drives the unit tests, `gnomon verify`, `gnomon bench ops` and the conformance of
outside kernels: ``check_provider(SPECS[name], provider, case)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gnomon.attention.spec import attention, cache, index, linear, moe, norms
from gnomon.attention.spec.check import check_all, check_provider
from gnomon.attention.spec.model import (
    Argument,
    Case,
    OpSpec,
    Scale,
    SpecResult,
    Tolerance,
)

__all__ = [
    "SPECS",
    "Argument",
    "Case",
    "OpSpec",
    "Scale",
    "SpecResult",
    "Tolerance",
    "check_all",
    "check_provider",
]

SPECS: Mapping[str, OpSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            *norms.SPECS,
            *cache.SPECS,
            *index.SPECS,
            *attention.SPECS,
            *moe.SPECS,
            *linear.SPECS,
        )
    }
)
