"""transformers as the oracle: the same weights, the same tokens, its logits, lists and experts.

In:  a model as gnomon knows it (ModelSource); sequences of token ids.
Out: Traces. A sequence is run in one pass without a cache, so that every row is teacher-forced on
     what stands before it. Its greedy choice at each row is compared with the token that gnomon put
     there: if all are equal then, by induction over the rows, transformers' own greedy generation
     from the same prompt is the same sequence.
The model is transformers' own class in its own precision rules, eager attention, eager experts. It
reads the user's folder where that says all there is to say. Where it cannot (random weights,
overridden fields, FP8 weights, whose dequantiser there is broken: oracle_math.md §3.6 item 1),
gnomon loads the weights and writes them to a temporary folder first.
Left as it is: transformers norms GLM's latents with eps 1e-6, whatever config.json says (item 3).
Whoever compares sets gnomon's `latent_norm_eps` to that (`LATENT_EPS`).
Not here: comparing (margins.py). transformers is imported here only, and only when needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.models.config import ModelConfig
from gnomon.models.export import save_checkpoint
from gnomon.models.loading import load_model_params
from gnomon.models.random_model import random_params
from gnomon.models.sources import ModelSource
from gnomon.verify.result import NotRunError
from gnomon.verify.trace import Trace

LATENT_EPS = 1e-6
INSTALL = "pip install 'gnomon[dev]'"


def require_transformers() -> None:
    """Raise NotRunError unless transformers is installed."""
    if find_spec("transformers") is None:
        raise NotRunError(f"transformers is not installed: {INSTALL}")


@contextmanager
def open_oracle(
    source: ModelSource, stored_dtype: torch.dtype, *, is_exported: bool
) -> Iterator[TransformersOracle]:
    """The oracle of a model; it computes in float32.

    `stored_dtype`: what the weights are rounded to first. `is_exported`: even if there is a folder
    that transformers could read, it gets the weights as gnomon read them.
    """
    require_transformers()
    if source.folder is not None and source.config.quantization is None and not is_exported:
        yield TransformersOracle(source.folder, source.config)
        return
    with tempfile.TemporaryDirectory(prefix="gnomon-oracle-") as name:
        export_plain(source, stored_dtype, Path(name))
        yield TransformersOracle(Path(name), source.config)


def export_plain(source: ModelSource, dtype: torch.dtype, folder: Path) -> None:
    """Write the weights, dequantised and rounded to `dtype`, as an ordinary checkpoint."""
    config = source.config
    if source.folder is None:
        params = random_params(config, source.seed, dtype)
    else:
        params = load_model_params(source.folder, config, dtype)
    save_checkpoint(folder, replace(config, quantization=None), params)


class TransformersOracle:
    """A model of transformers in float32, with hooks on what it chooses."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._config = config
        self._model = _load(folder)
        self._keys: dict[int, Tensor] = {}
        self._experts: dict[int, Tensor] = {}
        for number, layer in enumerate(self._model.model.layers):
            indexer = getattr(layer.self_attn, "indexer", None)
            if indexer is not None:
                indexer.register_forward_hook(self._keeper(self._keys, number, None))
            router = getattr(layer.mlp, "gate", None)
            if router is not None:
                router.register_forward_hook(self._keeper(self._experts, number, 2))

    @property
    def version(self) -> str:
        """The version of transformers."""
        return str(import_module("transformers").__version__)

    def _keeper(
        self, kept: dict[int, Tensor], layer: int, place: int | None
    ) -> Callable[..., None]:
        """A forward hook that keeps a module's output, or one of its outputs."""

        def keep(module: object, given: object, output: Any) -> None:
            kept[layer] = (output if place is None else output[place]).detach()

        return keep

    @torch.no_grad()
    def trace(self, name: str, tokens: Sequence[int], num_prompt: int) -> Trace:
        """The run over tokens[:-1], teacher-forced; `output` is what it would have chosen."""
        self._keys.clear()
        self._experts.clear()
        ids = torch.tensor([list(tokens[:-1])])
        logits = self._model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        num_rows = ids.shape[1]
        chosen = logits[num_prompt - 1 :].argmax(-1).tolist()
        return Trace(
            name=name,
            num_prompt=num_prompt,
            tokens=(*tokens[:num_prompt], *chosen),
            logits=logits.float(),
            is_computed=torch.ones(num_rows, dtype=torch.bool),
            keys={layer: _as_lists(found[0]) for layer, found in self._keys.items()},
            experts={layer: found.sort(-1).values for layer, found in self._experts.items()},
        )

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], num_new: int) -> tuple[int, ...]:
        """The tokens of transformers' own greedy generation, with its own cache."""
        ids = torch.tensor([list(prompt)])
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(found[0, len(prompt) :].tolist())


def _as_lists(ids: Tensor) -> Tensor:
    """Index sets [n, K] in any order, future positions among them, as ascending lists, −1 after."""
    position = torch.arange(ids.shape[0])[:, None]
    beyond = torch.iinfo(ids.dtype).max
    ordered = torch.where(ids <= position, ids, beyond).sort(-1).values
    return torch.where(ordered == beyond, -1, ordered)


def _load(folder: Path) -> Any:
    """The model, without progress bars and advice on its own config."""
    transformers = import_module("transformers")
    logging = import_module("transformers.utils.logging")
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
        ).eval()
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
