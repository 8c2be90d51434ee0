"""Redaction, proven on the bytes of the file: no token id, name or embedding is in it, and what is
left still replays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from gnomon.attention.providers.reference import PROVIDER as REFERENCE
from gnomon.attention.providers.torch import PROVIDER as TORCH
from gnomon.attention.recording_file import read_recording, to_bytes
from gnomon.attention.recording_redact import redacted
from gnomon.attention.recording_replay import replay
from gnomon.attention.recording_report import describe
from gnomon.models.sources import open_model, parse_model_spec
from tests.engine.tiny_engine import VOCAB
from tests.unit.recording.recorded import MODEL, PROMPTS, record, shifted

RUN = 4  # ids in a row that nobody would find by chance


def id_patterns():
    """Little-endian runs of the prompts' ids, in both widths, from several places."""
    for ids in PROMPTS.values():
        for start in range(0, len(ids) - RUN, RUN):
            for dtype in ("<i8", "<i4"):
                yield np.array(ids[start : start + RUN], dtype=dtype).tobytes()


@pytest.fixture(scope="module")
def embeddings():
    source = parse_model_spec(MODEL, overrides={}, default_vocab_size=VOCAB, default_seed=0)
    loaded = open_model(source, torch.float32, torch.device("cpu"), lambda _: None, 64)
    return loaded.model.embedding


def embedding_patterns(embeddings):
    """The first numbers of each prompt token's embedding, also as bfloat16."""
    for token in sorted({token for ids in PROMPTS.values() for token in ids}):
        yield embeddings[token, :8].numpy().tobytes()
        yield embeddings[token, :8].bfloat16().view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def hidden_files(tmp_path_factory):
    return record(tmp_path_factory.mktemp("steps") / "hidden", redact=True)


def test_an_open_recording_holds_what_a_redacted_one_must_not(files, embeddings):
    """The search finds something where there is something to find."""
    data = files[0].read_bytes()
    assert any(pattern in data for pattern in id_patterns())
    assert any(pattern in data for pattern in embedding_patterns(embeddings))
    assert b"a-name-to-hide" in data


@pytest.mark.parametrize("step", [0, 1])
def test_no_id_name_or_embedding_is_in_the_bytes(hidden_files, embeddings, step):
    data = hidden_files[step].read_bytes()
    assert not [pattern for pattern in id_patterns() if pattern in data]
    assert not [pattern for pattern in embedding_patterns(embeddings) if pattern in data]
    assert not [name for name in PROMPTS if name.encode() in data]


def test_no_tensor_is_a_function_of_single_tokens(hidden_files, files):
    """Nothing of layer 0 and nothing as wide as the hidden state is kept, under any name."""
    open_one, hidden = read_recording(files[0]), read_recording(hidden_files[0])
    assert hidden.is_redacted
    width = open_one.hidden_size
    tensors = safetensors.torch.load(hidden_files[0].read_bytes())
    assert not [name for name, t in tensors.items() if t.dim() > 1 and t.shape[-1] == width]
    layer0 = {
        tensor.contiguous().numpy().tobytes()
        for call in open_one.calls
        if call.layer == 0
        for tensor in call.results.values()
        if tensor.is_floating_point()
    }
    assert not [name for name, t in tensors.items() if t.numpy().tobytes() in layer0]


def test_the_rest_replays_and_still_finds_a_mistake(hidden_files, prefill):
    recording = read_recording(hidden_files[0])
    kept = [call for call in recording.calls if not call.withheld]
    assert {call.layer for call in kept} == {1, 2}
    assert {call.op for call in kept} == {call.op for call in prefill.calls} - {"moe"}
    assert replay(recording, TORCH).first is None
    report = replay(recording, REFERENCE)
    assert report.first is None
    assert report.skipped == {"redacted": len(recording.calls) - len(kept)}
    first = replay(recording, shifted("sparse_mla", (5, 2, 7), 0.01)).first
    assert first.layer == 1
    assert "row 5 (request 0, position 5), head 2" in describe(first, recording)


def test_texts_of_errors_go_too(prefill):
    call = replace(prefill.calls[-1], error="ValueError: 'the secret prompt' is odd", results=None)
    failed = replace(prefill, calls=(call,), error="ValueError: 'the secret prompt' is odd")
    data = to_bytes(redacted(failed))
    assert b"secret" not in data
    assert b"ValueError" in data


def test_redaction_is_idempotent_and_leaves_the_original(prefill):
    once = redacted(prefill)
    assert redacted(once) is once
    assert prefill.step.token_ids is not None
    assert not prefill.is_redacted
