"""Files of recordings: what goes in comes back, only the owner may read it, others are refused."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.attention.ops.values import RopeRows
from gnomon.attention.recording import PoolPart
from gnomon.attention.recording_file import (
    from_bytes,
    own_folder,
    read_recording,
    to_bytes,
    write_recording,
)
from gnomon.errors import ConfigError
from tests.unit.recording.recorded import PROMPTS


@pytest.fixture(scope="module")
def small(decode):
    """A recording of the calls of layer 0 without its weights' bulk."""
    return replace(decode, calls=tuple(call for call in decode.calls if call.layer == 0))


@pytest.fixture(scope="module")
def data(small):
    return to_bytes(small)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.stride() == other.stride()
            and torch.equal(one.contiguous().view(-1).view(torch.uint8),
                            other.contiguous().view(-1).view(torch.uint8))
        )  # fmt: skip
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, PoolPart):
        fields = ("page_ids", "slots", "entries")
        return (
            one.layout == other.layout
            and one.page_size == other.page_size
            and all(same(getattr(one, name), getattr(other, name)) for name in fields)
        )
    if isinstance(one, RopeRows):
        return same(one.cos, other.cos) and same(one.sin, other.sin)
    if hasattr(one, "norm_weight"):
        return same(one.norm_weight, other.norm_weight) and one.norm_eps == other.norm_eps
    return type(one) is type(other) and one == other


def test_a_recording_comes_back_to_the_bit(prefill):
    again = from_bytes(to_bytes(prefill), "again")
    assert again.origin == prefill.origin
    assert again.dims == prefill.dims
    assert again.providers == prefill.providers
    assert again.step.plan == prefill.step.plan
    assert again.step.request_ids == tuple(PROMPTS)
    for one, other in zip(prefill.calls, again.calls, strict=True):
        assert (one.op, one.layer, one.part, one.error) == (
            other.op,
            other.layer,
            other.part,
            other.error,
        )
        assert same(one.arguments, other.arguments)
        assert one.results.keys() == other.results.keys()
        assert all(same(one.results[name], other.results[name]) for name in one.results)
        assert all(torch.equal(one.rows[group], other.rows[group]) for group in one.rows)


def test_geometry_plan_and_tokens_are_those_of_the_step(prefill):
    step = prefill.step
    step.geometry.check()
    lengths = tuple(len(ids) for ids in PROMPTS.values())
    assert step.geometry.requests.host.query_len == lengths
    assert step.plan["routes"] == ["sparse", "dense", "sparse"]
    wanted = [token for ids in PROMPTS.values() for token in ids]
    assert step.token_ids[: sum(lengths)].tolist() == wanted
    assert step.token_ids[sum(lengths) :].sum() == 0


def test_rotations_that_were_one_value_are_one_again(prefill):
    again = from_bytes(to_bytes(prefill), "again")
    pairs = [call.arguments[3] for call in again.calls if call.op == "index_prepare"]
    assert pairs
    for call, loaded in zip(prefill.calls, again.calls, strict=True):
        if call.op == "index_prepare":
            (a, b), (c, d) = call.arguments[3], loaded.arguments[3]
            assert (a is b) == (c is d)


def test_only_the_owner_may_read_and_enter(files):
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700


def test_modes_do_not_hang_on_the_umask(tmp_path, small):
    old = os.umask(0)
    try:
        folder = own_folder(tmp_path / "a" / "b")
        write_recording(folder / "x.safetensors", small)
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "x.safetensors").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_folder_that_others_may_enter_is_refused(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 700"):
        own_folder(folder)


def test_a_file_is_never_overwritten(tmp_path, small):
    path = tmp_path / "x.safetensors"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        write_recording(path, small)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_recording(tmp_path / "gone")


def test_foreign_files_are_refused_each_in_its_words(data):
    tensors = {"weight": torch.zeros(3)}
    with pytest.raises(ConfigError, match=r"no recording of gnomon.*format is None"):
        from_bytes(safetensors.torch.save(tensors), "model.safetensors")
    with pytest.raises(ConfigError, match="format is 'pt'"):
        from_bytes(safetensors.torch.save(tensors, {"format": "pt"}), "model.safetensors")
    for text in (b"", b"short", b"#!/bin/sh\necho hello, this is a script\n" * 9, b"\xff" * 99):
        with pytest.raises(ConfigError, match="no safetensors file"):
            from_bytes(text, "script")
    newer = safetensors.torch.save(tensors, {"format": "gnomon.recording", "schema": "2"})
    with pytest.raises(ConfigError, match="schema 2; this version of gnomon reads schema 1"):
        from_bytes(newer, "new")
    assert from_bytes(data, "sound").calls


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1))
def test_a_file_cut_anywhere_is_refused(data, share):
    kept = data[: min(int(share * len(data)), len(data) - 1)]
    with pytest.raises(ConfigError, match=r"cut short|no safetensors file"):
        from_bytes(kept, "half")


MISTAKES = {
    "an operator unknown": lambda header: header["calls"][0].update(op="conv"),
    "a call without results": lambda header: header["calls"][0].pop("results"),
    "a tensor that is not there": lambda header: header["calls"][0]["arguments"].insert(
        0, {"tensor": "t9999"}
    ),
    "strides that leave the tensor": lambda header: header["calls"][0]["arguments"].insert(
        0, {"tensor": "t0", "stride": [10**9, 1]}
    ),
    "negative strides": lambda header: header["calls"][0]["arguments"].insert(
        0, {"tensor": "t0", "stride": [-1, -1]}
    ),
    "a layout that nobody has": lambda header: header["calls"][1]["arguments"].insert(
        0, {"pool": "mx4.v1", "computed": "float32"}
    ),
    "a dtype that is a function": lambda header: header["calls"][1]["arguments"].insert(
        0, {"pool": "fp32_80.v1", "computed": "load"}
    ),
    "dims that contradict": lambda header: header["dims"].update(index_topk=0),
    "spans that overlap": lambda header: header["step"]["axes"][0]["spans"].append([0, 0, 9, 0, 1]),
    "a list for the whole": lambda header: header.update(calls=7),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_damaged_header_is_refused(data, mistake):
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    header = json.loads(metadata["header"])
    MISTAKES[mistake](header)
    metadata["header"] = json.dumps(header)
    damaged = safetensors.torch.save(safetensors.torch.load(data), metadata)
    with pytest.raises(ConfigError, match="a damaged recording"):
        from_bytes(damaged, "bad")


def test_equal_tensors_are_stored_once(prefill):
    tensors = safetensors.torch.load(to_bytes(prefill))
    seen = {(t.dtype, tuple(t.shape), t.contiguous().numpy().tobytes()) for t in tensors.values()}
    assert len(seen) == len(tensors)
    named = sum(len(call.arguments) + len(call.results) for call in prefill.calls)
    assert len(tensors) < named
