"""What a model folder says about its tokenizer, read and checked before anything is built.

In:  a folder in Hugging Face layout, or the path of a tokenizer.json.
Out: `TokenizerFiles`: the checked document of tokenizer.json, the same document without added
     vocabulary, the start and end tokens, and the chat template, if the folder has one.
Errors: CheckpointError names the file, what was found, and what to do.
Not here: encoding and decoding (tokenizer.py), choosing a chat encoding (encodings/registry.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon.errors import CheckpointError

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of one tokenizer.

    `document` is tokenizer.json. `added` maps each added token's spelling to its id; `special`
    holds the ids among them that are flagged so (the ones that decoding may skip). `bos` is a
    spelling; `eos_ids` are in the order of the file that names them.
    """

    source: str
    document: Document
    added: Mapping[str, int]
    special: frozenset[int]
    bos: str | None = None
    adds_bos: bool = False
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None


def read_tokenizer_file(path: Path) -> TokenizerFiles:
    """Read and check one tokenizer.json; it alone names no start or end token."""
    document = _read_json(path, "the tokenizer in the format of the `tokenizers` library")
    _check_document(path, document)
    added = {token["content"]: int(token["id"]) for token in document.get("added_tokens", ())}
    special = frozenset(
        int(token["id"]) for token in document.get("added_tokens", ()) if token.get("special")
    )
    return TokenizerFiles(str(path), document, added, special)


def read_tokenizer_folder(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json and, where they are there, the files around it.

    End tokens: generation_config.json, else config.json, else tokenizer_config.json.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; give the folder that holds tokenizer.json"
        )
    files = read_tokenizer_file(folder / "tokenizer.json")
    settings = _read_optional(folder / "tokenizer_config.json")
    bos = _spelling(settings.get("bos_token"))
    if bos is not None and bos not in files.added:
        bos = None  # a name that the vocabulary does not know cannot be prepended
    return replace(
        files,
        bos=bos,
        adds_bos=settings.get("add_bos_token") is True and bos is not None,
        eos_ids=_end_ids(folder, files.added, settings),
        chat_template=_chat_template(folder, settings),
    )


def without_added_tokens(document: Document, source: str) -> Document:
    """The same tokenizer knowing no added token: no text can give one of their ids.

    Added tokens also leave the model's own vocabulary, so that it holds by construction: the ids
    that byte-pair encoding can give are entries of its vocabulary. One that a merge produces
    could be reached by ordinary text, so such a file is refused.
    """
    model = document["model"]
    names = {token["content"] for token in document.get("added_tokens", ())}
    reachable = names.intersection(_merged(model.get("merges", ())))
    if reachable:
        raise CheckpointError(
            f"{source}: ordinary text can give the added token(s) {sorted(reachable)[:5]}, because "
            "a merge of the model produces them; remove those merges or those added tokens"
        )
    vocab = {token: index for token, index in model["vocab"].items() if token not in names}
    plain = {key: value for key, value in document.items() if key != "added_tokens"}
    return {**plain, "added_tokens": [], "post_processor": None, "model": {**model, "vocab": vocab}}


def _check_document(path: Path, document: Document) -> None:
    model = document.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise CheckpointError(
            f"{path}: has no model.vocab; it is not a tokenizer.json of the `tokenizers` library, "
            "or it was truncated: copy it again from the checkpoint"
        )
    kind = model.get("type", "BPE")
    if kind != "BPE" or not _is_byte_level(document.get("decoder")):
        decoder = document.get("decoder")
        name = decoder.get("type") if isinstance(decoder, dict) else decoder
        raise CheckpointError(
            f"{path}: model {kind!r} with decoder {name!r} is not supported; gnomon reads "
            "byte-level BPE, which is what DeepSeek and GLM checkpoints have"
        )
    for token in document.get("added_tokens", ()):
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise CheckpointError(
                    f"{path}: added token {token['content']!r} sets {flag}, which gnomon does not "
                    "do; set it to false if the checkpoint was not trained with it"
                )


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", ())
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _merged(merges: object) -> Iterator[str]:
    """What each merge makes; a merge is "a b" in old files and ["a", "b"] in new ones."""
    if not isinstance(merges, list):
        return
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left + right


def _end_ids(folder: Path, added: Mapping[str, int], settings: Document) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _read_optional(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(item) is int and item >= 0 for item in ids):
            raise CheckpointError(
                f"{folder / name}: eos_token_id is {value!r}; a token id or a list of them is "
                "expected"
            )
        return tuple(dict.fromkeys(ids))
    spelling = _spelling(settings.get("eos_token"))
    return () if spelling is None or spelling not in added else (added[spelling],)


def _chat_template(folder: Path, settings: Document) -> str | None:
    """chat_template.jinja, else the field of tokenizer_config.json (one, or a list of named)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {str(entry.get("name")): entry.get("template") for entry in value}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is a {type(value).__name__}; "
            "a text, or a list of named ones with a `default`, is expected"
        )
    return value


def _spelling(value: object) -> str | None:
    """A token in tokenizer_config.json is its spelling, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_optional(path: Path) -> Document:
    return _read_json(path, "a JSON object") if path.is_file() else {}


def _read_json(path: Path, wanted: str) -> Document:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(entry.name for entry in path.parent.glob("*.json"))[:8]
        raise CheckpointError(
            f"{path} is missing: it should hold {wanted}. "
            f"The folder has {near or 'no .json file'}; copy it from the checkpoint"
        ) from None
    except (OSError, ValueError, RecursionError) as fault:
        raise CheckpointError(
            f"{path} cannot be read as JSON: {fault}. It should hold {wanted}; "
            "copy it again from the checkpoint"
        ) from fault
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; it should hold {wanted}")
    return value
