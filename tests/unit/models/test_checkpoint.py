"""safetensors headers: what is read, and every kind of damage that is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from gnomon.errors import CheckpointError
from gnomon.models.checkpoint import read_checkpoint, read_header

GOOD = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def write(path: Path, header: object, data: bytes = b"\0" * 24) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).half(),
        "scalar": torch.tensor(1.5),
        "codes": torch.zeros(4, 2, dtype=torch.float8_e4m3fn),
        "brain": torch.randn(2, 3, 4).bfloat16(),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    data = path.read_bytes()
    found = {tensor.key: tensor for tensor in read_header(path)}
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        stored = found[key]
        assert stored.shape == tuple(tensor.shape)
        raw = bytearray(data[stored.start : stored.start + stored.num_bytes])
        values = torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)
        assert torch.equal(values.float(), tensor.float())


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "F33", "shape": [2, 3], "data_offsets": [0, 24]}, "F33"),
        ({"dtype": None, "shape": [2, 3], "data_offsets": [0, 24]}, "None"),
        ({"dtype": "F32", "shape": [2, -3], "data_offsets": [0, 24]}, "shape"),
        ({"dtype": "F32", "shape": [2, True], "data_offsets": [0, 24]}, "shape"),
        ({"dtype": "F32", "shape": "23", "data_offsets": [0, 24]}, "shape"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24.0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]}, "24 bytes"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [-4, 20]}, "24 bytes"),
        ({"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]}, "32 bytes"),
        ({"dtype": "F32", "shape": [10**9] * 9, "data_offsets": [0, 24]}, "bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [20, 24]}, "expected"),
        ([], "None"),
    ],
)
def test_entries_that_cannot_be(entry: object, says: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "m.safetensors", {"a": entry}))
    assert says in message
    assert "'a'" in message


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"",
        b'{"a": {}, "a": {}}',
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_headers_that_are_no_object(raw: bytes, tmp_path: Path) -> None:
    assert "damaged" in refusal(write(tmp_path / "m.safetensors", raw))


@pytest.mark.parametrize("content", [b"", b"\0" * 7, struct.pack("<Q", 2**63) + b"{}"])
def test_files_that_are_too_short_for_their_header(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    assert "damaged" in refusal(path)


@pytest.mark.parametrize(("num_bytes", "what"), [(23, "truncated"), (25, "longer"), (0, "truncat")])
def test_files_of_the_wrong_length(num_bytes: int, what: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "m.safetensors", GOOD, b"\0" * num_bytes))
    assert what in message
    assert "expected" in message


def test_overlapping_tensors(tmp_path: Path) -> None:
    header = GOOD | {"b": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}
    assert "'b' at" in refusal(write(tmp_path / "m.safetensors", header))


@given(cut=st.integers(0, 400), flips=st.dictionaries(st.integers(0, 120), st.integers(1, 255)))
def test_no_damage_gets_through_as_another_error(
    cut: int, flips: dict[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any change gives a CheckpointError, or a header that still adds up."""
    good = save({"first": torch.arange(12.0).view(3, 4), "second": torch.zeros(5)})
    damaged = bytearray(good)
    for place, mask in flips.items():
        damaged[place % len(damaged)] ^= mask
    path = tmp_path_factory.mktemp("damaged") / "m.safetensors"
    path.write_bytes(damaged[: max(0, len(damaged) - cut)])
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    assert sum(tensor.num_bytes for tensor in tensors) <= len(damaged)
    assert all(tensor.start + tensor.num_bytes <= len(damaged) for tensor in tensors)


def shards(folder: Path, index: object) -> Path:
    write(folder / "one.safetensors", GOOD)
    write(folder / "two.safetensors", {"b": GOOD["a"]})
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_shards_with_and_without_an_index(tmp_path: Path) -> None:
    for name, index in (("with", {"a": "one.safetensors", "b": "two.safetensors"}), ("no", None)):
        (tmp_path / name).mkdir()
        checkpoint = read_checkpoint(shards(tmp_path / name, index))
        assert {key: tensor.path.name for key, tensor in checkpoint.tensors.items()} == {
            "a": "one.safetensors",
            "b": "two.safetensors",
        }


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, r"three\.safetensors.*'b'"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b'.*found nowhere"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "'a'.*found in one"),
        (
            {"a": "one.safetensors", "c": "two.safetensors"},
            "'c'.*found nowhere",
        ),
        ({"a": "../one.safetensors"}, "same folder"),
        ({"a": 3}, "same folder"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_indexes_that_do_not_fit(index: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_checkpoint(shards(tmp_path, index))


def test_tensor_that_the_index_does_not_know(tmp_path: Path) -> None:
    write(
        tmp_path / "one.safetensors",
        GOOD | {"c": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
    )
    index = {"weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'c' is in one\.safetensors but not in"):
        read_checkpoint(tmp_path)


def test_name_stored_twice(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", GOOD)
    write(tmp_path / "two.safetensors", GOOD)
    with pytest.raises(CheckpointError, match=r"'a' is stored twice: in one.* and in two"):
        read_checkpoint(tmp_path)


def test_two_checkpoints_in_one_folder(tmp_path: Path) -> None:
    shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    write(tmp_path / "model.safetensors", GOOD)
    with pytest.raises(CheckpointError, match="two checkpoints"):
        read_checkpoint(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_checkpoint(tmp_path)
