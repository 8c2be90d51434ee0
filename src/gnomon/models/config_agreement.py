"""Fields of a config.json that have to agree with each other, and the quantisation they announce.

In:  the fields, and for `check_agreement` the config that was read from them.
Out: nothing, or a `ConfigError` that names the field which contradicts another one; a `BlockFp8`.
Not here: single fields (config_reading), agreement between config and tensors (load_plan).
"""

from __future__ import annotations

from gnomon.models.config import BlockFp8, ModelConfig
from gnomon.models.config_fields import Fields, is_integer

CHECK_COPY = "The fields contradict each other: compare with the published config.json."


def check_agreement(fields: Fields, config: ModelConfig) -> None:
    """Refuse a config whose fields cannot all be true of one model."""
    num_experts, num_groups = config.n_routed_experts, config.n_group
    per_group = num_experts // num_groups
    in_reach = config.topk_group * per_group
    dim = config.index_head_dim
    needs: list[tuple[str, bool, str]] = [
        ("qk_rope_head_dim", config.qk_rope_head_dim % 2 == 0, "an even number"),
        ("index_head_dim", dim >= config.qk_rope_head_dim, "at least qk_rope_head_dim"),
        (
            "index_hadamard",
            not config.index_hadamard or dim & (dim - 1) == 0,
            f"false, as index_head_dim {dim} is no power of two",
        ),
        ("n_group", num_experts % num_groups == 0, f"a divisor of n_routed_experts {num_experts}"),
        (
            "n_group",
            num_groups == 1 or per_group >= 2,
            "at most half of n_routed_experts: a group is scored by its two best experts",
        ),
        ("topk_group", config.topk_group <= num_groups, f"at most n_group ({num_groups})"),
        (
            "num_experts_per_tok",
            config.num_experts_per_tok <= in_reach,
            f"at most {in_reach}, the experts in topk_group groups",
        ),
    ]
    for name, is_met, allowed in needs:
        if not is_met:
            raise fields.error(name, allowed, CHECK_COPY)
    equal = {
        "num_key_value_heads": config.num_attention_heads,
        "qk_head_dim": config.qk_head_dim,
    }
    for name, value in equal.items():
        fields.require(name, (value,), CHECK_COPY.rstrip("."))


def read_quantization(fields: Fields) -> BlockFp8 | None:
    """The block FP8 format, or None. Every other quantisation is refused by its name."""
    readable = "gnomon reads bf16, fp16, fp32 and block FP8; convert the checkpoint to one of them."
    if fields.has("compression_config"):
        raise fields.error("compression_config", "null", readable)
    quant = fields.section("quantization_config")
    if quant is None:
        return None
    quant.require("quant_method", ("fp8",), readable.rstrip("."))
    quant.word("quant_method", ("fp8",))
    quant.require("fmt", ("e4m3", "float8_e4m3fn"), "Other formats have other values per code")
    quant.require("activation_scheme", ("dynamic",), "Activations have no stored scales here")
    quant.require("scale_fmt", ("ue8m0", "float"), "A scale is multiplied, as fp32 or as 2^n")
    block = quant.values.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise quant.error("weight_block_size", "two whole numbers: rows, columns", readable)
    rows, columns = block
    if not (is_integer(rows) and is_integer(columns) and rows > 0 and columns > 0):
        raise quant.error("weight_block_size", "two positive whole numbers", readable)
    names = ("modules_to_not_convert", "ignored_layers")
    return BlockFp8(
        block_rows=rows,
        block_columns=columns,
        has_power_of_two_scales=quant.values.get("scale_fmt") == "ue8m0",
        kept_modules=tuple(word for name in names for word in quant.words(name) or ()),
    )
