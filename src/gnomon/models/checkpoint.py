"""The tensors that a model folder says it holds: every header read and checked, no data touched.

In:  a folder with safetensors files: one, or several with or without model.safetensors.index.json.
Out: `read_checkpoint(folder) -> Checkpoint`: a `StoredTensor` per name, with its file and place.
     `CheckpointError` for a missing shard, a damaged or truncated file, a name stored twice, or an
     index that does not agree with the shards.
Format: 8 bytes little-endian header length, the header (a JSON object: name to dtype, shape and
     data_offsets; `__metadata__` aside), then the data without gaps.
Not here: which tensors a model needs (load_plan), reading their bytes (loading).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import CheckpointError, ConfigError
from gnomon.models.config_fields import is_integer, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
BYTES_PER_ELEMENT = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
COPY_ANEW = "Copy the file anew."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `dtype` in safetensors' spelling; `start`: byte offset in the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All stored tensors of a folder by name, and its files in the order of reading."""

    folder: Path
    shards: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read every header of a model folder. Touches the first bytes of each file and no more."""
    weight_map = _read_index(folder)
    shards = _find_shards(folder, weight_map)
    tensors: dict[str, StoredTensor] = {}
    for path in shards:
        for tensor in read_header(path):
            twin = tensors.get(tensor.key)
            if twin is not None:
                raise CheckpointError(
                    f"Tensor '{tensor.key}' is stored twice: in {twin.path.name} and in "
                    f"{path.name}; expected once. Remove the file that is not of this checkpoint."
                )
            tensors[tensor.key] = tensor
    if weight_map is not None:
        _check_index(folder, weight_map, tensors)
    return Checkpoint(folder, shards, tensors)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Name to file name, as the index says; None where there is no index."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    try:
        weight_map = read_json_object(path, COPY_ANEW).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: 'weight_map' must map tensor names to files. {COPY_ANEW}")
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{path}: '{key}' is said to be in {name!r}; expected the name of a file "
                f"in the same folder. {COPY_ANEW}"
            )
    return weight_map


def _find_shards(folder: Path, weight_map: dict[str, str] | None) -> tuple[Path, ...]:
    if weight_map is None:
        shards = tuple(sorted(folder.glob("*.safetensors")))
        if not shards:
            raise CheckpointError(
                f"{folder} holds no *.safetensors file; expected {SINGLE_NAME}, or shards with "
                f"{INDEX_NAME}. Place them there; other weight formats are not read."
            )
        return shards
    names = sorted(set(weight_map.values()))
    if (folder / SINGLE_NAME).exists() and SINGLE_NAME not in names:
        raise CheckpointError(
            f"{folder} holds {SINGLE_NAME} and {INDEX_NAME}, which does not name it: two "
            "checkpoints in one folder. Remove one of them."
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        first = next(key for key, name in weight_map.items() if name == missing[0])
        raise CheckpointError(
            f"{INDEX_NAME} names {len(names)} shards, and {len(missing)} of them are not in "
            f"{folder}: {', '.join(missing[:8])} (holds '{first}'). Copy them there."
        )
    return tuple(folder / name for name in names)


def _check_index(
    folder: Path, weight_map: dict[str, str], tensors: Mapping[str, StoredTensor]
) -> None:
    """The index and the shards must tell the same story, or one of them is of another model."""
    for key, name in weight_map.items():
        tensor = tensors.get(key)
        found = "nowhere" if tensor is None else tensor.path.name
        if found != name:
            raise CheckpointError(
                f"Tensor '{key}': expected in {name} (says {INDEX_NAME} in {folder}), "
                f"found {'in ' if tensor else ''}{found}. Copy index and shards anew."
            )
    for key, tensor in tensors.items():
        if key not in weight_map:
            raise CheckpointError(
                f"Tensor '{key}' is in {tensor.path.name} but not in {INDEX_NAME} of {folder}. "
                "Copy index and shards anew."
            )


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file in the order of their data. `CheckpointError` if it is damaged."""
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(file_bytes - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"a header of {length} bytes in a file of {file_bytes}")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    entries = _parse(path, raw)
    start = 8 + length
    tensors = [_tensor(path, key, entry, start) for key, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.num_bytes))
    for tensor in tensors:
        if tensor.start != start:
            raise _damaged(path, f"tensor '{tensor.key}' at {tensor.start}, expected {start}")
        start += tensor.num_bytes
    if start != file_bytes:
        what = "truncated" if file_bytes < start else "longer than its header says"
        raise CheckpointError(
            f"{path} is {what}: expected {start} bytes, found {file_bytes}. {COPY_ANEW}"
        )
    return tensors


def _parse(path: Path, raw: bytes) -> dict[str, object]:
    """The header's JSON object without its metadata; a name that comes twice is damage."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _damaged(path, f"'{twice}' twice")
        return table

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "no JSON object")
    entries.pop("__metadata__", None)
    return entries


def _tensor(path: Path, key: str, entry: object, data_start: int) -> StoredTensor:
    """One entry of a header, with every number checked against the others."""
    values = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (values.get(name) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BYTES_PER_ELEMENT:
        raise _damaged(path, f"tensor '{key}' of dtype {dtype!r}; known: {[*BYTES_PER_ELEMENT]}")
    if not isinstance(shape, list) or not all(is_integer(size) and size >= 0 for size in shape):
        raise _damaged(path, f"tensor '{key}' of shape {shape!r}")
    if not isinstance(offsets, list) or not all(map(is_integer, offsets)) or len(offsets) != 2:
        raise _damaged(path, f"tensor '{key}' with data_offsets {offsets!r}")
    begin, end = offsets
    expected = math.prod(shape) * BYTES_PER_ELEMENT[dtype]
    if begin < 0 or end - begin != expected:
        raise _damaged(path, f"tensor '{key}' at {offsets}, which are not {expected} bytes")
    return StoredTensor(key, dtype, tuple(shape), path, data_start + begin, expected)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: its safetensors header has {what}. {COPY_ANEW}")
