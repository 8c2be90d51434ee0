"""Recordings as files: safetensors, with all that is not a tensor as JSON in its metadata.

In:  a Recording, a path.  Out: one file that only its owner may read (mode 0600), in a folder that
     only its owner may enter (0700); or, read back, the same Recording.
Equal tensors are stored once. A file that is cut short, foreign, damaged or of a newer schema is
ConfigError that says which. Nothing in a file is ever executed.
Not here: what is in the JSON (recording_header.py), what is left out of it (recording_redact.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from gnomon.attention.recording import Recording
from gnomon.attention.recording_header import TensorStore, decode_recording, encode_recording
from gnomon.errors import ConfigError, GnomonError

FORMAT = "gnomon.recording"
SCHEMA = 1
SUFFIX = ".safetensors"


def own_folder(path: Path) -> Path:
    """The folder, made if needed; ConfigError unless it is one that only this user may enter."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"record: cannot make the folder {path}: {error.strerror}") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"record: folder {path} has mode {found.st_mode & 0o777:04o} and belongs to user "
            f"{found.st_uid}; recordings hold what users wrote, so it has to be yours alone: "
            f"chmod 700 {path}, or name a folder that does not exist yet"
        )
    return path


def write_recording(path: Path, recording: Recording) -> None:
    """Write the file with mode 0600, whole or not at all. ConfigError if it is there already."""
    write_private(path, to_bytes(recording))


def write_private(path: Path, data: bytes) -> None:
    """Bytes to a new file with mode 0600; it has its name only once it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.link(partial, path)  # unlike a rename, this replaces nothing
        finally:
            partial.unlink(missing_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} exists; recordings are not overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_recording(path: Path) -> Recording:
    """The recording in a file; ConfigError if there is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return from_bytes(data, str(path))


def to_bytes(recording: Recording) -> bytes:
    """The bytes of a file."""
    store = _Deduplicating()
    header = json.dumps(encode_recording(recording, store), separators=(",", ":"))
    metadata = {"format": FORMAT, "schema": str(SCHEMA), "header": header}
    return safetensors.torch.save(store.tensors, metadata)


def from_bytes(data: bytes, name: str) -> Recording:
    """The recording in a file's bytes; errors call it ``name``."""
    metadata = _metadata(data, name)
    if metadata.get("format") != FORMAT:
        raise ConfigError(
            f"{name} is a safetensors file, but no recording of gnomon (its format is "
            f"{metadata.get('format')!r}, {FORMAT!r} is needed); make one with --record"
        )
    if metadata.get("schema") != str(SCHEMA):
        raise ConfigError(
            f"{name} is a recording of schema {metadata.get('schema')}; this version of gnomon "
            f"reads schema {SCHEMA}. Replay it with the version that made it"
        )
    try:
        tensors = safetensors.torch.load(data)
        return decode_recording(json.loads(metadata["header"]), tensors)
    except (
        GnomonError,
        SafetensorError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,  # torch's, for shapes that do not fit
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(
            f"{name} is a damaged recording ({type(error).__name__}: {error}); record the step "
            "again"
        ) from None


def _metadata(data: bytes, name: str) -> dict[str, str]:
    """The metadata of a safetensors file: 8 bytes of length, then JSON; then the tensors."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > 100_000_000 or data[8:9] != b"{":
        raise ConfigError(f"{name} is no safetensors file, so it is no recording of gnomon")
    if len(data) < 8 + length:
        raise ConfigError(_cut_short(name, len(data)))
    try:
        header: Any = json.loads(data[8 : 8 + length])
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key[:2] != "__"]
        missing = 8 + length + max(ends, default=0) - len(data)
        metadata = header.get("__metadata__") or {}
    except (ValueError, AttributeError, LookupError, TypeError):
        raise ConfigError(
            f"{name} is no safetensors file, so it is no recording of gnomon"
        ) from None
    if missing > 0:
        raise ConfigError(_cut_short(name, len(data)))
    return {str(key): str(value) for key, value in metadata.items()}


def _cut_short(name: str, num_bytes: int) -> str:
    return f"{name} is cut short: it ends after {num_bytes} bytes; copy it again, or record again"


class _Deduplicating(TensorStore):
    """Gives tensors names; equal ones share one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[bytes, str] = {}
        self._storages: set[int] = set()

    def put(self, tensor: Tensor) -> str:
        plain = tensor.cpu().contiguous()
        numbers = plain.view(-1).view(torch.uint8).numpy()
        digest = hashlib.blake2b(numbers.data, digest_size=20)
        digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        key = digest.digest()
        if key not in self._names:
            name = self._names[key] = f"t{len(self._names)}"
            if plain.untyped_storage().data_ptr() in self._storages:
                plain = plain.clone()  # safetensors refuses tensors that share memory
            self._storages.add(plain.untyped_storage().data_ptr())
            self.tensors[name] = plain
        return self._names[key]
