"""gnomon: serve DeepSeek Sparse Attention models, with every fast route checked on your machine.

Out: `LLM` (offline use), `AsyncLLM` (the same for asyncio), `SamplingParams`, `__version__`.
The names are resolved on first use, so that `import gnomon` costs nothing and loads no torch.
Not here: the attention library, which is used alone as `gnomon.attention`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnomon.engine.sampling_params import SamplingParams
    from gnomon.frontend.async_llm import AsyncLLM
    from gnomon.frontend.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name from its home when it is first asked for."""
    home = {
        "LLM": "gnomon.frontend.llm",
        "AsyncLLM": "gnomon.frontend.async_llm",
        "SamplingParams": "gnomon.engine.sampling_params",
    }.get(name)
    if home is None:
        raise AttributeError(f"module 'gnomon' has no attribute {name!r}; public: {__all__}")
    return getattr(import_module(home), name)
