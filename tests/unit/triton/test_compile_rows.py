"""Row and cache kernels at real widths, compiled for sm_90, and once for 80, 89 and 120.

No spills, shared memory within limits. The widths are V3.2's and GLM-5's: hidden size 7168 and
6144, latents of 512 + 64, 64 and 32 index heads of 128.
"""

from __future__ import annotations

from gnomon.attention.providers.triton import (
    cache,
    cache_gather,
    cache_kernels,
    prepare,
    route,
    rows,
    rows_quantise,
)
from gnomon.attention.providers.triton.language import UNFUSED
from tests.unit.triton.ahead_of_time import Build, compile_all, faults

PACKAGE = "gnomon.attention.providers.triton"
FP8 = {"RANK": 512, "ROPE": 64, "GROUP": 128, "GROUPS_BLOCK": 4, "GROUP_BLOCK": 128}
WRITTEN = {"ROWS_BLOCK": cache.TILE.latents, "num_warps": cache.TILE.num_warps}
PLAIN = {"RANK": 512, "ROPE": 64, "GROUP": 512, "GROUPS_BLOCK": 1, "GROUP_BLOCK": 512}
INDEX = {"HEADS": 64, "DI": 128, "DIM": 64, "BLOCK": 128, "SCALE": 128**-0.5, "PAGE": 64}
QUERIES = {
    "X_HEADS": 128,
    "X_DIM": 64,
    "X_HEADS_BLOCK": cache.TILE.turned,
    "X_BLOCK": 64,
    "IS_X_INTERLEAVED": True,
}
TURNED = {"IS_Q_INTERLEAVED": False, "IS_K_INTERLEAVED": False}


def build(module: str, kernel: object, kinds: dict[str, str], **given: object) -> Build:
    """A build of ``kernel``; ``given``: constants, and arch, num_warps."""
    arch, warps = given.pop("arch", 90), given.pop("num_warps", 4)
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in given else kinds[name] for name in names}
    wide = tuple(n for n, kind in signature.items() if kind.startswith("*") or "stride" in n)
    constants = {name: given[name] for name in names if name in given}
    return Build(
        f"{PACKAGE}.{module}",
        kernel.__name__,
        signature,
        constants,
        {"num_warps": warps, **UNFUSED},
        arch,
        wide,
    )


def norms() -> list[Build]:
    x = dict.fromkeys(("x", "weight", "out", "delta", "total", "bias"), "*bf16")
    kinds = {**x, "stride": "i32", "delta_stride": "i32", "eps": "fp32"}
    wide = {"D": 7168, "BLOCK": 8192, "num_warps": 16}
    turned = {**x, "cos": "*fp32", "sin": "*fp32", "row_stride": "i32", "head_stride": "i32"}
    heads = {"HEADS": 128, "WIDTH": 64, "DIM": 64, "HEADS_BLOCK": 32, "BLOCK": 64}
    return [
        build("rows", rows.rms_norm_kernel, kinds, **wide),
        build("rows", rows.add_rms_norm_kernel, kinds, **wide),
        build("rows", rows.layer_norm_kernel, kinds, D=128, BLOCK=128, num_warps=1),
        build("rows", rows.rope_kernel, turned, **heads, IS_INTERLEAVED=True),
    ]


def routes() -> list[Build]:
    kinds = dict.fromkeys(("logits", "bias", "weights", "margins"), "*fp32")
    kinds |= {"request": "*i32", "ids": "*i64", "stride": "i32", "scale": "fp32"}
    kinds |= {"shared_expert": "i32", "part_stride": "i32"}
    v32 = {"K": 8, "GROUPS": 8, "WIDTH": 32, "TOP_GROUPS": 4, "GROUPS_BLOCK": 8, "WIDTH_BLOCK": 32}
    glm = {**v32, "GROUPS": 1, "WIDTH": 256, "TOP_GROUPS": 1, "GROUPS_BLOCK": 1, "WIDTH_BLOCK": 256}
    rest = {"PLACES": 9, "K_BLOCK": 16, "IS_NORMALISED": True, "HAS_REQUEST": True, "num_warps": 1}
    whole, parts = {"PARTS": 1, "IS_EARLY": False}, {"PARTS": 16, "IS_EARLY": True}
    return [
        build("route", route.route_kernel, kinds, **widths, **rest, **logits, WANT_MARGIN=is_asked)
        for widths, is_asked, logits in (
            (v32, True, whole),
            (v32, False, whole),
            (v32, False, parts),
            (glm, False, parts),
        )
    ]


def quantised() -> list[Build]:
    kinds = dict.fromkeys(("x", "delta", "weight", "total", "out"), "*bf16")
    kinds |= {"codes": "*u8", "scales": "*fp32", "eps": "fp32", "ids": "*i64"}
    strides = ("stride", "delta_stride", "part_stride", "scale_stride")
    kinds |= dict.fromkeys(strides, "i32")
    wide = {"D": 7168, "BLOCK": 8192, "num_warps": 16, "HAS_DELTA": True, "NATIVE": True}
    one = {"PARTS": 1, "HAS_IDS": False, "IS_SUM": False}
    splits, shares = (
        one | {"PARTS": 4, "IS_SUM": True},
        {"PARTS": 9, "HAS_IDS": True, "IS_SUM": True},
    )
    kernel = rows_quantise.norm_quantise_kernel
    return [
        build("rows_quantise", kernel, kinds | delta, **wide, **parts, IS_POWER_OF_TWO=kind)
        for kind, parts, delta in (
            (False, one, {}),
            (True, one, {}),
            (False, splits, {"delta": "*fp32"}),
            (False, shares, {}),
        )
    ]


def writes(arch: int = 90) -> list[Build]:
    half = dict.fromkeys(("kv", "weight", "bias", "q", "k", "out"), "*bf16")
    turn = dict.fromkeys(("cos", "sin", "q_cos", "q_sin", "k_cos", "k_sin"), "*fp32")
    sizes = dict.fromkeys(("num_rows", "key_programs", "pool_stride"), "i32")
    strides = dict.fromkeys(("kv_stride", "q_stride", "head_stride", "k_stride"), "i32")
    kinds = {**half, **turn, **sizes, **strides, "slots": "*i64", "eps": "fp32"}
    packed, plain = {**kinds, "pool": "*u8"}, {**kinds, "pool": "*bf16"}
    native = {"NATIVE": arch >= 89, "arch": arch}
    latent = {"ROPE_BLOCK": 64, "IS_INTERLEAVED": True, "PAGE": 64, **native, **WRITTEN}
    many = {"HEADS_BLOCK": cache.TILE.heads, "KEYS_BLOCK": cache.TILE.keys}
    dotted = {"HEADS_BLOCK": 16, "KEYS_BLOCK": 16}
    index = {**INDEX, **TURNED, **native, "num_warps": cache.TILE.num_warps}
    latent_write, prepare = cache_kernels.latent_write_kernel, cache_kernels.index_prepare_kernel
    return [
        build("cache_kernels", latent_write, packed, **FP8, **latent, WIDTH=656, IS_PACKED=True),
        build("cache_kernels", latent_write, plain, **PLAIN, **latent, WIDTH=576, IS_PACKED=False),
        build(
            "cache_kernels", prepare, packed, **index, **many, HAS_HADAMARD=False, IS_PACKED=True
        ),
        *(
            build("cache_kernels", prepare, kind, **index, **dotted, HAS_HADAMARD=True, **packs)
            for kind, packs in ((plain, {"IS_PACKED": False}), (packed, {"IS_PACKED": True}))
        ),
    ]


def gathers(arch: int = 90) -> list[Build]:
    kinds = {"pages": "*i32", "out": "*bf16", "start": "i32", "length": "i32", "stride": "i32"}
    packed, plain = {**kinds, "pool": "*u8"}, {**kinds, "pool": "*bf16"}
    size, native = {"PAGE": 64, "arch": arch}, {"NATIVE": arch >= 89}
    latent = {**FP8, "ROPE_BLOCK": 64, "WIDTH": 656, "TOKENS_BLOCK": 8}
    keys = {"DIM": 128, "BLOCK": 128, "TOKENS_BLOCK": 32}
    module = cache_gather
    return [
        build("cache_gather", module.gather_plain_kernel, plain, **size, D=576, BLOCK=2048),
        build("cache_gather", module.gather_latent_kernel, packed, **latent, **size, **native),
        build("cache_gather", module.gather_index_keys_kernel, packed, **keys, **size, **native),
    ]


def joined(arch: int = 90) -> list[Build]:
    half = dict.fromkeys(("x", "x_out", "kv", "weight", "q", "k", "k_weight", "k_bias"), "*bf16")
    names = prepare.prepare_attention_kernel.arg_names
    turn = {name: "*fp32" for name in names if name.endswith(("cos", "sin"))}
    sizes = {name: "i32" for name in names if name.startswith("num_") or "stride" in name}
    sizes |= {name: "i32" for name in names if name.endswith("_programs")}
    sizes |= {"eps": "fp32", "k_eps": "fp32"}
    kinds = {**half, **turn, **sizes, "q_out": "*bf16", "slots": "*i64", "k_slots": "*i64"}
    packed = {**kinds, "pool": "*u8", "k_pool": "*u8"}
    plain = {**kinds, "pool": "*bf16", "k_pool": "*bf16"}
    native = {"NATIVE": arch >= 89, "IS_K_NATIVE": arch >= 89, "arch": arch}
    index = {**INDEX, **TURNED, "K_PAGE": 64, **WRITTEN}
    index |= {"HEADS_BLOCK": cache.TILE.heads, "KEYS_BLOCK": cache.TILE.keys}
    given = {**index, **QUERIES, "ROPE_BLOCK": 64, "IS_INTERLEAVED": True, **native}
    given |= {"HAS_HADAMARD": False}
    kernel = prepare.prepare_attention_kernel
    fp8 = {**FP8, "WIDTH": 656, "IS_PACKED": True, "IS_K_PACKED": True}
    bf16 = {**PLAIN, "WIDTH": 576, "IS_PACKED": False, "IS_K_PACKED": False}
    return [
        build("prepare", kernel, packed, **given, **fp8),
        build("prepare", kernel, plain, **given, **bf16),
    ]


def test_kernels_compile_without_spills() -> None:
    builds = [*norms(), *writes(), *gathers(), *joined(), *routes(), *quantised()]
    for arch in (80, 89, 120):
        builds += [*(writes(arch)[place] for place in (0, 2, 4)), gathers(arch)[1]]
    reports = compile_all(builds)
    assert len(reports) == len(builds)
    assert not faults(reports)
    free = [r for r in reports if "HAS_HADAMARD': True" not in r.label and "sm_80" not in r.label]
    crowded = [r.label for r in free if r.registers > 128]
    assert not crowded  # four blocks of a multiprocessor at least
