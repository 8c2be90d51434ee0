"""Thin, optional adapters to installed libraries: flashmla, deepgemm, fa3, flashinfer.

In:  the folder of --provider-path, if any. Out: their providers, whether or not the libraries are
here: one that is not says so in `gnomon explain`, with what to do about it.
Nothing is imported or unpacked before a need meets a provider's requirement.
"""

from __future__ import annotations

from gnomon.attention.dispatch import Provider
from gnomon.attention.providers.external import deepgemm_library, fa3, flashinfer, flashmla
from gnomon.attention.providers.external.deepgemm import deepgemm_provider
from gnomon.attention.providers.external.fa3 import fa3_provider
from gnomon.attention.providers.external.flashinfer import flashinfer_provider
from gnomon.attention.providers.external.flashmla import flashmla_provider
from gnomon.attention.providers.external.places import Places

FILES = (flashmla.FILE, fa3.FILE)
PACKAGES = (flashmla.PACKAGE, fa3.PACKAGE, deepgemm_library.PACKAGE, flashinfer.PACKAGE)


def external_providers(folder: str | None = None) -> tuple[Provider, ...]:
    """All adapters. ConfigError if ``folder`` is none, or holds nothing that they look for."""
    places = Places(folder)
    places.require_any(FILES, PACKAGES)
    return (
        flashmla_provider(places),
        deepgemm_provider(places),
        fa3_provider(places),
        flashinfer_provider(places),
    )
