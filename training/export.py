"""A checkpoint of the training as a model folder: `python -m training.export --from F --to G`.

In:  a training checkpoint; the tokenizer that ships with gnomon.
Out: config.json, generation_config.json (greedy), model.safetensors (bfloat16; the routers' bias
     float32), tokenizer.json, tokenizer_config.json, a chat template where the family has one.
The MTP layer is stored under the hub's names as layer `num_hidden_layers`, without copies of
embedding and head: it uses the model's own, and 3 MB would say nothing new.
Needs gnomon.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.params import hub_layer_prefix, param_specs
from training import checkpoint
from training.data.writing import BOS, EOS, TOKENIZER
from training.parameters import Parameters, initial_parameters
from training.plans import PLANS
from training.shapes import CONFIGS, PAD_ID, Shape

MTP_ONLY = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


def export(source: Path, folder: Path) -> dict[str, Any]:
    """Write the model folder; what the checkpoint says about itself."""
    place = json.loads((source / "progress.json").read_text(encoding="utf-8"))
    name = PLANS[place["plan"]].shape
    shape = Shape.of(CONFIGS[name])
    params = initial_parameters(shape, 0, "cpu")
    checkpoint.load(source, params, None)
    write_folder(folder, CONFIGS[name], params)
    return place


def write_folder(folder: Path, values: dict[str, Any], params: Parameters) -> None:
    """The files of a model with these parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        main = Path(scratch)
        save_checkpoint(main, read_config(values), params, dtype=torch.bfloat16)
        tensors = load_file(main / "model.safetensors")
        shutil.copy(main / "config.json", folder / "config.json")
    ends = {name: values[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", {**ends, "do_sample": False})
    tensors |= mtp_tensors(values, params)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    _write_tokenizer_config(folder, values)


def mtp_tensors(values: dict[str, Any], params: Parameters) -> dict[str, Tensor]:
    """The MTP layer under its stored names."""
    config = read_config(values)
    layer = config.num_hidden_layers
    longer = replace(
        config,
        num_hidden_layers=layer + 1,
        mlp_layer_types=(*config.mlp_layer_types, "sparse"),
        indexer_types=(*config.indexer_types, "full"),
    )
    found: dict[str, Tensor] = {}
    for spec in param_specs(longer):
        if not spec.name.startswith(f"layers.{layer}."):
            continue
        value = params[spec.name].detach()
        dtype = torch.float32 if spec.name.endswith("router.bias") else torch.bfloat16
        for source in spec.sources:
            found[source.key] = value[source.index].to(dtype).contiguous()
    for own in MTP_ONLY:
        value = params[f"layers.{layer}.{own}"].detach()
        found[hub_layer_prefix(layer) + own] = value.to(torch.bfloat16)
    return found


def _write_tokenizer_config(folder: Path, values: dict[str, Any]) -> None:
    is_glm = values["model_type"] == "glm_moe_dsa"
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": values["max_position_embeddings"],
        "pad_token": "<|endoftext|>" if is_glm else json.loads(TOKENIZER.read_text("utf-8"))[
            "added_tokens"][PAD_ID]["content"],
        "eos_token": "<|endoftext|>" if is_glm else EOS,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if is_glm:
        shutil.copy(TOKENIZER.parent / "glm_chat_template.jinja", folder / "chat_template.jinja")
    else:
        settings |= {"bos_token": BOS, "add_bos_token": True}
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--to", dest="folder", type=Path, required=True)
    args = parser.parse_args()
    place = export(args.source, args.folder)
    size = (args.folder / "model.safetensors").stat().st_size
    print(f"{args.folder}: {size / 1e6:.2f} MB, step {place['step']} of {place['of']}")


if __name__ == "__main__":
    main()
