"""Providers: families of kernels behind the same operator contracts (spec.py).

``builtin_providers()`` names those that come with gnomon and need nothing but torch.
"""

from __future__ import annotations

from gnomon.attention.dispatch import Provider
from gnomon.attention.providers import reference, torch


def builtin_providers() -> tuple[Provider, ...]:
    """All providers that this installation can offer, in no order of preference."""
    return (torch.PROVIDER, reference.PROVIDER)
