"""`gnomon bench step`: the steps are those asked for, over pages that no two requests share."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from gnomon.bench import step_report
from gnomon.bench.ceilings import Ceilings
from gnomon.bench.step import StepCell, StepResult, bench_steps
from gnomon.bench.step_inputs import (
    decode_schedule,
    fill_cache,
    pages_needed,
    prefill_schedules,
)
from gnomon.bench.timing import Timing
from gnomon.cli.bench_step import step_cells
from gnomon.cli.main import build_app
from gnomon.engine.assembly import assemble
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError

CEILINGS = Ceilings(copy_bytes_s=2e9, matmul_flop_s=1e12, fp8_matmul_flop_s=None)
PAGE = 16


def _used_pages(schedule):
    return [int(page) for item in schedule.items for page in item.pages[0]]


def test_decode_requests_hold_pages_of_their_own() -> None:
    schedule = decode_schedule(3, 33, PAGE, 0)
    pages = _used_pages(schedule)
    assert len(set(pages)) == len(pages) == 9
    assert 0 not in pages  # the null page
    assert max(pages) + 1 == pages_needed(3, 33, PAGE)
    assert all(item.kv_len == 33 and item.needs_sample for item in schedule.items)


@pytest.mark.parametrize(("batch", "length", "most"), [(1, 50, 64), (1, 50, 16), (3, 20, 32)])
def test_prefill_computes_every_token_once_in_order(batch: int, length: int, most: int) -> None:
    steps = prefill_schedules(batch, length, PAGE, most)
    seen: Counter[str] = Counter()
    for schedule in steps:
        assert schedule.num_tokens == sum(item.num_new_tokens for item in schedule.items) <= most
        for item in schedule.items:
            assert item.num_computed == seen[item.request_id]
            assert item.token_ids == item.tokens[item.num_computed : item.kv_len]
            seen[item.request_id] += item.num_new_tokens
            assert item.needs_sample == (item.kv_len == length)
    assert seen == {f"prefill-{length}-{place}": length for place in range(batch)}
    assert all(schedule.num_tokens == most for schedule in steps[:-1])


@pytest.fixture(scope="module")
def parts():
    config = EngineConfig.of(
        model="random:deepseek_v32,layers=2",
        tokenizer="none",
        num_kv_pages=12,
        block_size=PAGE,
        max_num_seqs=4,
    )
    return assemble(config, lambda *_: None, default_vocab_size=64)


def test_cells_are_timed_or_say_why_not(parts) -> None:
    fill_cache(parts.cache, 1)
    filled = [pool.layout.gather(pool, torch.arange(4)) for pool in parts.cache.pools.values()]
    assert all(bool(entries.any()) for entries in filled)
    cells = [StepCell("decode", 2, 40), StepCell("prefill", 1, 40), StepCell("decode", 4, 400)]
    dropped: list[str] = []
    parts.builder.drop = dropped.append
    decode, prefill, too_large = bench_steps(parts, cells, 32, with_profile=False)
    del parts.builder.drop
    assert {"decode-0", "decode-1", "prefill-40-0"} <= set(dropped)
    assert decode.device is not None
    assert prefill.device is not None
    assert too_large.device is None
    assert too_large.reason == "needs 101 cache pages, there are 12"


def test_a_peer_is_scaled_by_the_ceilings_of_both_runs(tmp_path) -> None:
    path = tmp_path / "peer.json"
    times = {"decode 2x40": 3.0, "prefill 1x40": 4.0}
    ceilings = {"copy_gb_s": 4.0, "matmul_tflop_s": 0.5}
    path.write_text(json.dumps({"milliseconds": times, "has_head": False, **ceilings}))
    peer = step_report.Peer(path)
    decode = StepCell("decode", 2, 40)
    assert peer.scaled(decode, CEILINGS) == 6.0  # today's device copies half as fast
    assert peer.scaled(StepCell("prefill", 1, 40), CEILINGS) == 2.0  # and multiplies twice as fast
    timing, head = Timing(3600.0, 3600.0, 3600.0, 1), Timing(600.0, 600.0, 600.0, 1)
    result = StepResult(decode, timing, timing, head)
    assert peer.ratio(result, CEILINGS) == 0.5  # without the head, as the peer
    assert step_report.result_line(result, peer, CEILINGS).endswith("0.50")
    whole = step_report.as_json([result], peer, CEILINGS, {})
    assert whole["steps"][0]["ratio_to_peer"] == 0.5
    assert peer.scaled(StepCell("decode", 1, 40), CEILINGS) is None


def test_a_bad_peer_file_or_cell_is_refused(tmp_path) -> None:
    path = tmp_path / "peer.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="milliseconds"):
        step_report.Peer(path)
    with pytest.raises(ConfigError, match="batch x length"):
        step_cells("decode", "1x2,x")
    assert step_cells("decode", "") == []
    assert step_cells("decode", "1x2, 3x4") == [StepCell("decode", 1, 2), StepCell("decode", 3, 4)]


def test_steps_that_the_engine_would_not_run_say_why(parts) -> None:
    long = dataclasses.replace(parts, info=msgspec.structs.replace(parts.info, max_model_len=64))
    cells = [StepCell("decode", 1, 65), StepCell("prefill", 1, 65), StepCell("decode", 5, 16)]
    reasons = [result.reason for result in bench_steps(long, cells, 32, with_profile=False)]
    assert reasons[:2] == ["is longer than max_model_len = 64"] * 2
    assert reasons[2] == "has more requests than max_num_seqs = 4"


def bench(*arguments: str):
    return CliRunner().invoke(build_app(), ["bench", *arguments])


SMALL = ("random:deepseek_v32,layers=1", "--num-kv-pages", "8", "--max-num-seqs", "2")


def test_the_command_writes_table_json_and_picture(tmp_path) -> None:
    peer = tmp_path / "peer.json"
    values = {"milliseconds": {"decode 1x32": 3.0}, "copy_gb_s": 4.0, "matmul_tflop_s": 0.5}
    peer.write_text(json.dumps(values))
    files = ("--json", str(tmp_path / "s.json"), "--picture", str(tmp_path / "s.svg"))
    asked = ("--decode", "1x32,9x64", "--prefill", "1x32", "--peer", str(peer))
    done = bench("step", *SMALL, *asked, *files)
    assert done.exit_code == 0, done.exception
    whole = json.loads((tmp_path / "s.json").read_text())
    steps, run = whole["steps"], whole["run"]
    assert run["model"] == "random:deepseek_v32,layers=1"
    assert run["providers"]["topk"] == "torch"
    assert [step["step"] for step in steps] == ["decode 1x32", "decode 9x64", "prefill 1x32"]
    assert "has more requests" in steps[1]["reason"] or "cache pages" in steps[1]["reason"]
    assert "decode 1x32" in (tmp_path / "s.svg").read_text()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--decode", "0x64"), "both at least 1"),
        (("--decode", "2x0"), "both at least 1"),
        (("--decode", "", "--prefill", ""), "nothing to measure"),
        (("--profile", "--device", "cpu"), "--profile lists kernels of a GPU"),
        (("--record", "x"), "record is for serving"),
        (("--json", "/no/such/folder/x.json"), "/no/such/folder is no folder"),
        (("--picture", "x.xyz"), "has to end with one of .png"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(arguments, named) -> None:
    result = bench("step", "random:deepseek_v32,layers=1", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert named in str(result.exception)
    assert "weights" not in result.stdout


def test_ops_files_are_checked_first_too(tmp_path) -> None:
    for flags in (("--json", str(tmp_path)), ("--picture", str(tmp_path / "p.bmp"))):
        result = bench("ops", *flags)
        assert isinstance(result.exception, ConfigError)
        assert "ceilings" not in result.stdout
