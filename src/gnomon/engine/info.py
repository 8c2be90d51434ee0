"""EngineInfo of an assembled engine: what the front of the house, /server_info and logs say of it.

In:  the resolved configuration, the loaded model, rows on the chosen providers, the cache.
Out: a wire.EngineInfo. Not here: choosing any of them (resolve.py, assembly.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.cache.tensors import CacheTensors
from gnomon.engine.resolve import ResolvedConfig
from gnomon.engine.wire import EngineInfo
from gnomon.models.sources import LoadedModel


def engine_info(
    resolved: ResolvedConfig,
    loaded: LoadedModel,
    operators: Sequence[tuple[str, str, str, str]],
    cache: CacheTensors,
) -> EngineInfo:
    """All that is fixed once an engine is ready."""
    config, schema = resolved.given, cache.schema
    return EngineInfo(
        model_label=loaded.label,
        model_type=str(loaded.config.model_type),
        revision=loaded.revision,
        folder=None if loaded.folder is None else str(loaded.folder),
        tokenizer=config.tokenizer,
        vocab_size=loaded.config.vocab_size,
        max_model_len=resolved.max_model_len,
        max_in_flight=resolved.max_num_seqs + config.max_queue_size,
        drain_timeout_s=config.drain_timeout_s,
        eos_token_ids=loaded.generation_defaults.eos_token_ids,
        generation_defaults=dict(loaded.generation_defaults.sampling),
        resolved=resolved.table(),
        operators=list(operators),
        cache={
            "latent_layout": resolved.latent_layout.id,
            "index_layout": resolved.index_layout.id,
            "bytes": cache.num_bytes,
            "prefix_step_tokens": schema.prefix_step_tokens or 0,
            "index_topk": loaded.config.index_topk,
            "layers": loaded.config.num_hidden_layers,
            "layers_that_select": loaded.config.indexer_types.count("full"),
            **{f"pages.{name}": count for name, count in resolved.num_pages.items()},
        },
    )
