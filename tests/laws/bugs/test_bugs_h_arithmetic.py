"""Cases H of reference/bugs.md: arithmetic that differs from the reference.

The oracle is plain_model.py: float64, whole prompts, its own top-k. Cases of the indexer's
operators are in test_bugs_h_indexer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.attention.routes import DensePolicy, RoutePolicy
from gnomon.attention.taps import RecordingTap
from gnomon.errors import CheckpointError, ConfigError
from gnomon.models.config_reading import read_config
from gnomon.models.export import save_checkpoint
from gnomon.models.sources import open_model, parse_model_spec
from tests.laws.bugs.engines import bug_core, outputs, prompt, request
from tests.laws.bugs.op_cases import watched
from tests.laws.bugs.plain_model import PlainRun, plain_run, rms
from tests.laws.bugs.tiny import Bench, Token, assert_same_rows, selections, t0_spec, token_list
from tests.unit.models.checkpoint_folders import small_shape, stored_tensors, write_folder


def assert_equals_plain(bench: Bench, tokens: list[int], run: PlainRun) -> None:
    """Selections of every layer and hidden rows."""
    tap = RecordingTap(wants_margin=False)
    rows = bench.prefill([bench.request("r", tokens)], tap=tap)
    for (layer, _), sets in selections(tap).items():
        assert sets == run.attended[layer], f"layer {layer}"
    assert torch.allclose(torch.stack(list(rows.values())), run.hidden, atol=1e-10)


@pytest.mark.parametrize("interleaved", ["true", "false"])
@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_h1_index_rope_of_both_styles(kind: str, interleaved: str) -> None:
    """Topk 4, 24 tokens: each layer selects as the reference does, not as the other style."""
    bench = Bench(kind, {"topk": 4, "indexer_rope_interleave": interleaved})
    tokens = token_list(24)
    assert_equals_plain(bench, tokens, plain_run(bench.config, bench.params, tokens))
    style = bench.config.indexer_rope_interleave
    wrong = plain_run(bench.config, bench.params, tokens, index_interleaved=not style)
    with pytest.raises(AssertionError):
        assert_equals_plain(bench, tokens, wrong)


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_h2_the_config_field_decides(kind: str) -> None:
    """Flipping it changes what is selected; a rope field that nobody knows is fatal."""
    tokens, found = token_list(40), []
    for value in ("true", "false"):
        bench, tap = Bench(kind, {"indexer_rope_interleave": value}), RecordingTap()
        bench.prefill([bench.request("r", tokens)], tap=tap)
        found.append(selections(tap))
    assert found[0] != found[1]
    source = parse_model_spec(t0_spec(kind)).config
    assert source.indexer_rope_interleave == (kind == "T2")  # each family's own default
    for field, value in (("rope_flavour", "half"), ("index_rope_style", 2)):
        with pytest.raises(ConfigError, match=field):
            read_config(small_shape(), {field: value})


@pytest.mark.parametrize("left_out", ["indexer.wk.weight", "indexer.k_norm.bias"])
def test_h7_a_parameter_that_nothing_fills_is_fatal(tmp_path: Path, left_out: str) -> None:
    shape = small_shape()
    tensors = stored_tensors(read_config(shape))
    key = f"model.layers.1.self_attn.{left_out}"
    folder = write_folder(tmp_path / "m", shape, {k: v for k, v in tensors.items() if k != key})
    with pytest.raises(CheckpointError, match=key):
        open_model(folder)


def test_h7_shared_layers_attend_their_sources_lists() -> None:
    """Layers S take the very lists of the nearest F before them, and have no index weights."""
    bench, lists = Bench("T2"), []

    def watch(name: str, args: tuple[Any, ...]) -> None:
        if name == "sparse_mla":
            lists.append(args[3])

    bench.ops = watched(bench.ops, watch)
    tokens = token_list(30)
    tap = RecordingTap(wants_margin=False)
    bench.prefill([bench.request("r", tokens)], tap=tap)
    assert sorted(layer for layer, _ in selections(tap)) == [0, 4]
    for layer in range(8):
        source = bench.config.index_source(layer)
        assert source == layer // 4 * 4
        assert torch.equal(lists[layer], lists[source])
        assert (f"layers.{layer}.indexer.wk.weight" in bench.params) == (layer == source)
    assert not torch.equal(lists[0], lists[4])


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_h9_every_layer_runs_sparse_past_topk(kind: str) -> None:
    """Per step: one attention a layer over K keys, one top-k a layer that selects."""
    bench, calls = Bench(kind), []
    bench.ops = watched(bench.ops, lambda name, args: calls.append((name, args)))
    one = bench.request("r", token_list(40))
    for n in (12, 1, 20, 7):
        calls.clear()
        bench.step([(one, n)])
        attended = [args[4] for name, args in calls if name == "sparse_mla"]
        assert len(attended) == bench.config.num_hidden_layers
        expected = [min(p + 1, 8) for p in range(one.done - n, one.done)]
        assert all(count.tolist() == expected for count in attended)
        full = sum(bench.config.has_indexer(layer) for layer in range(len(attended)))
        scored = [args for name, args in calls if name == "topk"]
        assert len(scored) >= full  # one a layer that selects, or more where scores come in chunks
        assert not any(name == "dense_mha" for name, _ in calls)


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_h10_a_written_checkpoint_keeps_the_rope_style(kind: str, tmp_path: Path) -> None:
    """The report's fix was lost in a refactoring: the style survives writing and reading."""
    for value in ("true", "false"):
        bench = Bench(kind, {"indexer_rope_interleave": value})
        folder = tmp_path / value
        save_checkpoint(folder, bench.config, bench.params)
        loaded = open_model(folder, torch.float64)
        assert loaded.config.indexer_rope_interleave == bench.config.indexer_rope_interleave
        bench.model = loaded.model
        tokens = token_list(24)
        assert_equals_plain(bench, tokens, plain_run(bench.config, bench.params, tokens))


@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_h11_no_layer_diverges_on_a_long_prompt(kind: str) -> None:
    """220 tokens, 27 times topk: hidden rows after each layer; the first that differs is named."""
    tokens = token_list(220, 5)
    whole = Bench(kind)
    run = plain_run(whole.config, whole.params, tokens)
    for layers in range(1, whole.config.num_hidden_layers + 1):
        fields: dict[str, Any] = {"layers": layers}
        if kind == "T2":
            fields["pattern"] = "FSSSFSSS"[:layers]
        bench = Bench(kind, fields)  # the same weights: each tensor is drawn by its name
        rows = bench.prefill([bench.request("r", tokens)])
        normed = rms(run.layers[layers - 1], bench.params["norm.weight"], bench.config.rms_norm_eps)
        got = torch.stack(list(rows.values()))
        assert torch.allclose(got, normed, atol=1e-9), f"first diverging layer: {layers - 1}"


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_h12_prefill_and_one_decode_equal_a_longer_prefill(length: int) -> None:
    """Around multiples of the page (4) and of topk (8)."""
    tokens, bench = token_list(length + 1, length), Bench()
    whole = bench.prefill([bench.request("r", tokens)])
    one = bench.request("r", tokens)
    got: dict[Token, Any] = bench.step([(one, length)])
    got |= bench.step([(one, 1)])
    assert_same_rows(whole, got)
    dense = RoutePolicy(DensePolicy.ALWAYS)
    one = bench.request("r", tokens)
    got = bench.step([(one, length)], policy=dense) | bench.step([(one, 1)], policy=dense)
    assert_same_rows(whole, got)


def test_h13_the_sparse_path_is_seen_to_be_on() -> None:
    """Smaller topk changes tokens, topk >= length does not; the selecting parts are named."""
    asks = [request("r", prompt(40), 16)]
    found = {}
    for topk in (4, 16, 64, 512):
        core = bug_core(fields={"topk": topk})
        found[topk] = outputs(core, asks)["r"]
        operators = {op: provider for op, provider, _, _ in core.info.operators}
        assert operators["sparse_mla"]
        assert operators["topk"]
        told = core.info.cache  # what /server_info shows
        assert (told["index_topk"], told["layers"], told["layers_that_select"]) == (topk, 3, 3)
    assert found[64] == found[512]
    assert len({tuple(tokens) for tokens in found.values()}) == 3


@pytest.mark.parametrize("provider", ["torch", "reference"])
def test_h14_a_value_width_of_its_own(provider: str) -> None:
    """Heads of 24 values over latents of 32: widths are never taken from one another."""
    tokens = token_list(30)
    for v_dim in (24, 32, 40):
        bench = Bench(fields={"v_dim": v_dim}, provider=provider)
        assert_equals_plain(bench, tokens, plain_run(bench.config, bench.params, tokens))
