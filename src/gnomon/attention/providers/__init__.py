"""Providers: families of kernels behind the same operator contracts (spec.py).

``builtin_providers()`` names those that come with gnomon and can run here: torch and the reference
always, triton where it is installed and finds a GPU (or TRITON_INTERPRET=1 asks for a CPU's).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os

from torch import cuda

from gnomon.attention.dispatch import Provider
from gnomon.attention.providers import reference, torch

logger = logging.getLogger(__name__)


def builtin_providers() -> tuple[Provider, ...]:
    """All providers that this installation can offer, in no order of preference."""
    portable = triton_provider()
    return (torch.PROVIDER, reference.PROVIDER, *((portable,) if portable is not None else ()))


def triton_provider() -> Provider | None:
    """The triton provider; None, said in the log where it surprises, if it cannot run here.

    Triton is imported here and not before: a plain CPU never pays for it.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (is_interpreted or cuda.is_available()):
        return None
    if importlib.util.find_spec("triton") is None:
        logger.warning("triton is not installed: torch serves its operators, slower by far")
        return None
    try:
        package = importlib.import_module("gnomon.attention.providers.triton")
        if is_interpreted:
            importlib.import_module(f"{package.__name__}.interpreter").repair()
    except (ImportError, RuntimeError) as error:
        logger.warning("triton cannot be imported (%s): torch serves its operators", error)
        return None
    provider: Provider = package.PROVIDER
    return provider
