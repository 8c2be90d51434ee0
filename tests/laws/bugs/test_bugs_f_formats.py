"""Cases F of reference/bugs.md: KV formats, scale conventions, dtypes.

F1, the third motivating fault, is in tests/laws/test_motivating_faults_mixed.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnomon.attention.layouts import IndexKeyDims, LatentDims, choose_layout
from gnomon.attention.layouts.fp8_ds_mla_656 import Fp8LatentLayout
from gnomon.attention.layouts.index_k_132 import Fp8IndexKeyLayout
from gnomon.attention.taps import RecordingTap, ReplayTap
from gnomon.engine import assembly
from gnomon.engine.config import EngineConfig
from gnomon.errors import ConfigError, GnomonError, LayoutError
from gnomon.models.sources import parse_model_spec
from tests.laws.bugs.engines import bug_core, outputs, prompt, request, run
from tests.laws.bugs.op_cases import PROVIDERS, op_case, operators
from tests.laws.bugs.tiny import Bench, assert_same_rows, selections, t0_spec, token_list

SCALE = 0.3
PACKED = Fp8LatentLayout(512, 64, read_dtype=torch.float64)


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).double()


# ------------------------------------------------------------------ F2, F3, F4: scales


@pytest.mark.parametrize("ratio", [0.013, 0.7, 1.9, 3.3])
def test_f2_scales_are_powers_of_two_for_every_reader(ratio: float) -> None:
    """Groups whose amax / 448 is no power of two; a reader that rounds scales up is off by half."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(6, 576, generator=generator)
    groups = values[:, :512].view(6, 4, 128)
    groups *= 448 * ratio / groups.abs().amax(-1, keepdim=True)
    read = PACKED.dequantise(PACKED.quantise(values))
    assert bool(((read - values).abs() <= PACKED.round_trip_bound(values)).all())
    scales = PACKED.quantise(values)[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(scales, 2.0 ** scales.log2().round())
    raised = 2.0 ** math.ceil(math.log2(ratio))
    naive = e4m3(groups[0, 0] / ratio) * raised  # written with amax / 448, read as a power of two
    assert float((naive / groups[0, 0].double()).median()) == pytest.approx(
        raised / ratio, rel=0.02
    )


def test_f2_ids_past_the_pool_are_refused() -> None:
    case = op_case([1], [8], rank=512, rope=64, layout=PACKED)
    for slot in (case.pool.num_slots, 2**31 + 5):
        with pytest.raises(LayoutError, match=f"slot {slot} is past the pool"):
            case.pool.layout.gather(case.pool, torch.tensor([[slot]]))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("value", [1.0, 0.37, 300.0])
def test_f3_equal_values_come_out_as_they_went_in(value: float, provider: str) -> None:
    """V = constant everywhere: the output is that constant, within 1 % (e4m3 keeps 4 bits)."""
    case = op_case([3], [40], rank=512, rope=64, layout=PACKED)
    slots = case.geometry.tables["tokens"].slots(torch.zeros(1), torch.arange(40)[None])
    PACKED.write(case.pool, slots[0], torch.full((40, 576), value))
    count = case.geometry.rows.kv_len
    lists = slots.expand(3, -1).masked_fill(torch.arange(40) >= count[:, None], -1)
    out, _ = operators(provider).kernels["sparse_mla"](
        case.q_latent.data / value, case.q_rope.data / value, case.pool, lists, count, SCALE
    )
    rounded = float(e4m3(torch.tensor(value) / 2.0 ** math.ceil(math.log2(value / 448))))
    rounded *= 2.0 ** math.ceil(math.log2(value / 448))
    assert float((out - rounded).abs().max()) <= 1e-9 * value
    assert rounded == pytest.approx(value, rel=2.0**-4)
    lowered = 2.0 ** math.floor(math.log2(value / 448)) / (value / 448)  # the report's reader
    assert lowered == 1 or 0.5 <= lowered < 0.99


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_f4_small_latents_beside_a_large_rope_part(heads: int) -> None:
    """Latents below 0.1, rope near 1: each part within its own relative error."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(24, 576, generator=generator)
    values[:, :512] *= 0.03
    read = PACKED.dequantise(PACKED.quantise(values)).float()
    for part, bound in ((slice(0, 512), 0.04), (slice(512, 576), 0.004)):
        error = (read[:, part] - values[:, part]).norm() / values[:, part].norm()
        assert float(error) < bound
    scale = float(values[:, :512].abs().max()) / 448  # one scale, of the latents alone
    naive = e4m3(values[:, 512:] / scale) * scale
    assert float((naive - values[:, 512:]).norm() / values[:, 512:].norm()) > 0.5  # saturated
    case = op_case([2], [24], rank=512, rope=64, heads=heads, layout=PACKED)
    PACKED.write(
        case.pool, case.geometry.tables["tokens"].slots(torch.zeros(24), torch.arange(24)), values
    )
    case.stored[0] = read.double()
    slots = (
        case.geometry.tables["tokens"].slots(torch.zeros(1), torch.arange(24)[None]).expand(2, -1)
    )
    count = case.geometry.rows.kv_len
    slots = slots.masked_fill(torch.arange(24) >= count[:, None], -1)
    out, _ = operators().kernels["sparse_mla"](
        case.q_latent.data, case.q_rope.data, case.pool, slots, count, SCALE
    )
    assert torch.allclose(out, case.expected(case.causal(), SCALE)[0], atol=1e-10)


# ------------------------------------------------------------------ F5, F6, F7: what starts


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_ds_mla_528", "bfloat16"])
def test_f5_nope_latents_in_every_format(name: str, provider: str) -> None:
    layout = choose_layout(name, LatentDims(512, 0), torch.float64)
    case = op_case([2, 1], [9, 21], rank=512, rope=0, layout=layout)
    rows = case.geometry.rows
    ids = torch.arange(21).expand(3, -1)
    slots = case.geometry.tables["tokens"].slots(rows.request[:, None], ids)
    slots = slots.masked_fill(ids >= rows.kv_len[:, None], -1)
    out, _ = operators(provider).kernels["sparse_mla"](
        case.q_latent.data, case.q_rope.data, case.pool, slots, rows.kv_len, SCALE
    )
    assert torch.allclose(out, case.expected(case.causal(), SCALE)[0], atol=1e-9)


def test_f5_a_model_without_rope_is_refused_by_its_field() -> None:
    """No family that is built has NoPE; the refusal comes with the config, before any weight."""
    with pytest.raises(ConfigError, match="'qk_rope_head_dim' is 0; allowed"):
        parse_model_spec(t0_spec(rope_dim=0))


LAYOUTS = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "x")
PROVIDER_FLAGS = ("auto", "reference", "torch", "flashmla")


@pytest.mark.parametrize("kind", ["T0", "T2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_f6_every_combination_serves_or_refuses_before_weights(
    layout: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    real = assembly.open_model
    monkeypatch.setattr(assembly, "open_model", lambda *a, **k: loads.append(a) or real(*a, **k))
    for provider in PROVIDER_FLAGS:
        loads.clear()
        flags = {"kv_layout": layout, "attention_provider": provider}
        if layout in ("fp8_e5m2", "nvfp4", "x") or provider == "flashmla":
            with pytest.raises(GnomonError, match=f"{layout}|flashmla") as refusal:
                bug_core(kind, **flags)
            assert loads == []
            assert any(word in str(refusal.value) for word in ("llowed", "at hand", "these can"))
        else:
            core = bug_core(kind, **flags)
            assert len(outputs(core, [request("r", prompt(11), 1)])["r"]) == 1


@pytest.mark.parametrize("layout", ["auto", "fp8"])
def test_f7_the_choice_of_every_operator_is_told_with_its_reason(layout: str) -> None:
    found = assembly.survey(EngineConfig.of(model=t0_spec(), kv_layout=layout, dtype="float32"))
    core = bug_core(kv_layout=layout)
    told = {op: (provider, reason) for op, provider, reason, _ in core.info.operators}
    assert told.keys() == {choice.op for choice in found.choices}
    assert all(provider and reason for provider, reason in told.values())
    assert core.info.cache["latent_layout"] == found.resolved.latent_layout.id
    assert core.info.resolved["kv_layout"][0] in (layout, found.resolved.latent_layout.id)
    if layout == "fp8":
        plain = assembly.survey(EngineConfig.of(model=t0_spec(), dtype="float32"))
        sizes = [one.resolved.schema.bytes_per_page("tokens") for one in (found, plain)]
        assert sizes[0] < sizes[1] / 1.75


# ------------------------------------------------------------------ F8 to F12: quality, batches


def divergence(left: Tensor, right: Tensor) -> float:
    """Mean KL of next-token distributions, in nats."""
    p, q = left.double().log_softmax(-1), right.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("layout", "bound", "overlap"),
    [("float16", 1e-6, 0.98), ("bfloat16", 1e-4, 0.9), ("fp8_ds_mla", 0.01, 0.75)],
)
@pytest.mark.parametrize("kind", ["T0", "T2"])
def test_f8_a_quantised_cache_stays_on_the_sparse_path(
    kind: str, layout: str, bound: float, overlap: float
) -> None:
    """Over two turns: near the exact cache in its outputs (choices replayed) and in its choices."""
    tokens = token_list(90)

    def logits_of(name: str, tap: RecordingTap | ReplayTap) -> Tensor:
        bench = Bench(kind, kv_layout=name)
        one = bench.request("r", tokens)
        return bench.logits(bench.step([(one, 50)], tap=tap) | bench.step([(one, 40)], tap=tap))

    exact, own = RecordingTap(wants_margin=False), RecordingTap(wants_margin=False)
    expected = logits_of("auto", exact)
    replayed = logits_of(layout, ReplayTap(exact.recording))
    assert 0 < divergence(expected, replayed) < bound
    logits_of(layout, own)
    shares = []
    for key, rows in selections(own).items():
        assert all(len(chosen) == min(8, p + 1) for p, chosen in enumerate(rows))
        pairs = list(zip(selections(exact)[key], rows, strict=True))[8:]
        shares += [len(ours & theirs) / 8 for ours, theirs in pairs]
    assert sum(shares) / len(shares) > overlap


@pytest.mark.parametrize("provider", PROVIDERS)
def test_f10_32_heads_are_two_times_16(provider: str) -> None:
    """Every token's entry is distinct, so that a half that reads its neighbour's shows."""
    case = op_case([5], [30], heads=32, layout=None)
    rows, ids = case.geometry.rows, torch.arange(30).expand(5, -1)
    slots = case.geometry.tables["tokens"].slots(rows.request[:, None], ids)
    slots = slots.masked_fill(ids >= rows.kv_len[:, None], -1)
    kernel = operators(provider).kernels["sparse_mla"]
    whole = kernel(case.q_latent.data, case.q_rope.data, case.pool, slots, rows.kv_len, SCALE)
    halves = [
        kernel(
            case.q_latent.data[:, part],
            case.q_rope.data[:, part],
            case.pool,
            slots,
            rows.kv_len,
            SCALE,
        )
        for part in (slice(0, 16), slice(16, 32))
    ]
    assert torch.allclose(whole[0], torch.cat([half[0] for half in halves], 1), atol=1e-13)
    assert torch.allclose(whole[0], case.expected(case.causal(), SCALE)[0], atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_f11_packed_fp8_in_every_batch_size(size: int) -> None:
    """Finite, and each request's rows are those that it has alone."""
    bench = Bench(kv_layout="fp8_ds_mla", num_pages=600)
    requests = [bench.request(f"r{i}", token_list(4 + i % 19, i)) for i in range(size)]
    together = bench.prefill(requests)
    assert all(bool(row.isfinite().all()) for row in together.values())
    for i in {0, size // 2, size - 1}:
        one = bench.request(f"r{i}", token_list(4 + i % 19, i))
        alone = bench.prefill([one])
        assert_same_rows(alone, {token: together[token] for token in alone})


def test_f12_the_second_turn_over_a_packed_cache() -> None:
    """Two turns behind a system prompt: on cached pages = computed anew."""
    found = {}
    for caching in (True, False):
        core = bug_core(kv_layout="fp8", enable_prefix_caching=caching)
        system, first = prompt(21, 1), prompt(14, 2)
        answer = outputs(core, [request("one", system + first, 10)])["one"]
        second = request("two", system + first + answer + prompt(9, 3), 12)
        deltas = run(core, [second])["two"]
        assert (deltas[-1].num_cached_tokens >= 40) == caching
        found[caching] = (answer, [token for delta in deltas for token in delta.token_ids])
    assert found[True] == found[False]


def test_f12_index_keys_follow_the_latents_format() -> None:
    """No reader takes packed latents with index keys of a format that nobody stated."""
    found = assembly.survey(EngineConfig.of(model=t0_spec(), kv_layout="fp8", dtype="float32"))
    assert isinstance(found.resolved.index_layout, Fp8IndexKeyLayout)
    assert choose_layout("fp8", IndexKeyDims(128), torch.bfloat16).id == "index_k_132"
