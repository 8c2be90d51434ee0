"""How the models in `gnomon/assets` were trained: data, model, loop, measurement, export.

Not part of the package. It needs torch, numpy and tokenizers; only `export` imports gnomon.
"""

from __future__ import annotations
