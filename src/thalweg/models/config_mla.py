"""The MLA family (DeepSeek-V3, R1, Kimi K2) as numbers, read from `config.json`. No torch."""

import math
from dataclasses import dataclass

from thalweg.models.config_keys import Keys, Quantization, YarnScaling, read_quantization, read_yarn

ALIASES = {
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_experts_per_token": ("num_experts_per_tok",),
    "num_mtp_layers": ("num_nextn_predict_layers", "num_mtp_layers"),
}
REQUIRED = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "first_k_dense_replace",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_token",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
)


@dataclass(frozen=True)
class MlaConfig:
    """Names as in the released files. `q_lora_rank` None: queries come from one projection, `q_proj`.

    The first `first_k_dense_replace` layers have a dense MLP of `intermediate_size`, the others experts.
    `rope_interleave`: rotary pairs are neighbours (2i, 2i + 1) in the checkpoint's projections.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_token: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    scoring_func: str
    topk_method: str
    rope_theta: float
    rope_scaling: YarnScaling | None
    rope_interleave: bool
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    num_mtp_layers: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: Quantization | None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_magnitude(self) -> float:
        """Factor on cos and sin: YaRN's attention factor, 1 without YaRN."""
        scaling = self.rope_scaling
        if scaling is None:
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if scaling.mscale is not None and scaling.mscale_all_dim is not None:
            return _yarn_mscale(scaling.factor, scaling.mscale) / _yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return _yarn_mscale(scaling.factor, 1.0)

    @property
    def softmax_scale(self) -> float:
        """Factor on q.k: 1/sqrt(qk_head_dim), times the square of YaRN's mscale over all dimensions."""
        scaling = self.rope_scaling
        mscale = 1.0
        if scaling is not None and scaling.mscale_all_dim is not None:
            mscale = _yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return self.qk_head_dim**-0.5 * mscale * mscale


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_mla(keys: Keys) -> MlaConfig:
    """Raises UserError, one line, for what is missing, inconsistent, or of an architecture this model does not have."""
    keys.require(REQUIRED)
    rope = keys.table("rope_parameters") or keys.table("rope_scaling")
    bases = Keys({"rope_theta": rope.get("rope_theta", keys.get("rope_theta"))}, keys.source, {})
    bases.require(("rope_theta",))
    config = MlaConfig(
        hidden_size=keys.integer("hidden_size"),
        num_layers=keys.integer("num_layers"),
        num_heads=keys.integer("num_heads"),
        q_lora_rank=keys.integer("q_lora_rank") if keys.has("q_lora_rank") else None,
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim"),
        v_head_dim=keys.integer("v_head_dim"),
        first_k_dense_replace=keys.integer("first_k_dense_replace", minimum=0),
        intermediate_size=keys.integer("intermediate_size"),
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        n_routed_experts=keys.integer("n_routed_experts"),
        num_experts_per_token=keys.integer("num_experts_per_token"),
        n_shared_experts=keys.integer("n_shared_experts"),
        n_group=keys.integer("n_group"),
        topk_group=keys.integer("topk_group"),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        norm_topk_prob=keys.boolean("norm_topk_prob", True),
        scoring_func=keys.choice("scoring_func", "sigmoid", ("sigmoid",)),
        topk_method=keys.choice("topk_method", "noaux_tc", ("noaux_tc",)),
        rope_theta=bases.rope_base("rope_theta"),
        rope_scaling=read_yarn(rope, keys.source),
        rope_interleave=keys.boolean("rope_interleave", True),
        rms_norm_eps=keys.number("rms_norm_eps"),
        attention_bias=keys.boolean("attention_bias", False),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        num_mtp_layers=keys.integer("num_mtp_layers", 0, minimum=0),
        vocab_size=keys.integer("vocab_size"),
        bos_token_id=keys.token_id("bos_token_id"),
        eos_token_ids=keys.token_ids("eos_token_id"),
        pad_token_id=keys.token_id("pad_token_id"),
        quantization=read_quantization(keys),
    )
    _check(config, keys)
    return config


def _check(config: MlaConfig, keys: Keys) -> None:
    keys.check_experts("n_routed_experts", config.n_routed_experts, config.num_layers)
    if config.qk_rope_head_dim % 2:
        raise keys.error("qk_rope_head_dim", config.qk_rope_head_dim, "an even number")
    if config.first_k_dense_replace > config.num_layers:
        raise keys.error("first_k_dense_replace", config.first_k_dense_replace, f"at most {config.num_layers} layers")
    if config.n_routed_experts % config.n_group:
        raise keys.error("n_group", config.n_group, f"a divisor of the {config.n_routed_experts} experts")
    if 1 < config.n_group > config.n_routed_experts // 2:
        raise keys.error(
            "n_group", config.n_group, "1, or groups of two experts or more: a group scores by its best two"
        )
    if config.topk_group > config.n_group:
        raise keys.error("topk_group", config.topk_group, f"at most the {config.n_group} groups")
    if config.num_experts_per_token > config.n_routed_experts // config.n_group * config.topk_group:
        raise keys.error(
            "num_experts_per_token", config.num_experts_per_token, "at most the experts of topk_group groups"
        )
    if keys.integer("moe_layer_freq", 1) != 1:
        raise keys.error("moe_layer_freq", keys.get("moe_layer_freq"), "1")
    keys.choice("hidden_act", "silu", ("silu",))
    if keys.boolean("tie_word_embeddings", False):
        raise keys.error("tie_word_embeddings", True, "false")
