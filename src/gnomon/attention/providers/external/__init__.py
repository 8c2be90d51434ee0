"""Thin, optional adapters to installed libraries: flashmla, deepgemm, fa3, flashinfer.

In:  the folder of --provider-path, if any. Out: their providers, whether or not the libraries are
here: one that is not says so in `gnomon explain`, with what to do about it.
Nothing is imported or unpacked before a need meets a provider's requirement.
"""

from __future__ import annotations

from gnomon.attention.dispatch import Provider
from gnomon.attention.providers.external.deepgemm import deepgemm_provider
from gnomon.attention.providers.external.fa3 import fa3_provider
from gnomon.attention.providers.external.flashinfer import flashinfer_provider
from gnomon.attention.providers.external.flashmla import flashmla_provider
from gnomon.attention.providers.external.places import Places


def external_providers(folder: str | None = None) -> tuple[Provider, ...]:
    """All adapters. ConfigError if ``folder`` is not one."""
    places = Places(folder)
    return (
        flashmla_provider(places),
        deepgemm_provider(places),
        fa3_provider(places),
        flashinfer_provider(places),
    )
