"""Providers: families of kernels behind the same operator contracts (spec.py).

``builtin_providers()`` names those that come with gnomon and can run here: torch and the reference
always, triton where it is installed and finds a GPU (or TRITON_INTERPRET=1 asks for a CPU's).
``absent_providers()`` stands for the rest of them, with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil

from torch import cuda

from gnomon.attention.dispatch import OPERATORS, Provider
from gnomon.attention.providers import reference, torch
from gnomon.attention.providers.absent import AbsentProvider

logger = logging.getLogger(__name__)

COMPILERS = ("gcc", "clang")
TRITON_RANK = 20  # behind kernels made for one GPU and libraries of others


def builtin_providers() -> tuple[Provider, ...]:
    """All providers that this installation can offer, in no order of preference."""
    plain = (torch.PROVIDER, reference.PROVIDER)
    portable = _triton()
    if not isinstance(portable, str):
        return (*plain, portable)
    if cuda.is_available():
        logger.warning("triton is not used: %s. torch serves, slower by far", portable)
    return plain


def absent_providers() -> tuple[Provider, ...]:
    """Those that come with gnomon and cannot run here: they refuse everything, with the reason."""
    portable = _triton()
    if not isinstance(portable, str):
        return ()
    return (AbsentProvider("triton", TRITON_RANK, OPERATORS, portable),)


def c_compiler() -> str | None:
    """What Triton builds the launchers of its kernels with: what CC names, else gcc, else clang."""
    named = os.environ.get("CC")
    candidates = COMPILERS if named is None else (named,)
    return next(filter(None, map(shutil.which, candidates)), None)


def _triton() -> Provider | str:
    """The triton provider; or why it cannot run here.

    Triton is imported here and not before: a plain CPU never pays for it.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (is_interpreted or cuda.is_available()):
        return "needs a CUDA GPU, and torch finds none (TRITON_INTERPRET=1 runs it here, for tests)"
    if importlib.util.find_spec("triton") is None:
        return "not installed; pip install triton"
    if not is_interpreted and c_compiler() is None:
        return "needs a C compiler (what CC names, gcc or clang), and none is found; install gcc"
    try:
        package = importlib.import_module("gnomon.attention.providers.triton")
        if is_interpreted:
            importlib.import_module(f"{package.__name__}.interpreter").repair()
    except (ImportError, OSError, RuntimeError) as error:
        return f"cannot be imported: {error}"
    provider: Provider = package.PROVIDER
    return provider
