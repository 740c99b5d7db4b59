"""The DeepSeek-V4 architecture as numbers, read from the three kinds of `config.json` in circulation. No torch.

Kinds: DeepSeek's release (`num_hidden_layers`, `compress_ratios`, `rope_scaling`), what transformers writes
(`layer_types`, `mlp_layer_types`, `rope_parameters` with `main` and `compress`), and the file beside DeepSeek's own
inference code (`dim`, `n_layers`, `rope_factor`).
"""

from dataclasses import dataclass
from typing import Any

from thalweg.errors import UserError
from thalweg.models.config_keys import Keys, Quantization, YarnScaling, read_quantization, read_yarn

SWA, CSA, HCA = 0, 4, 128
COMPRESS_RATIOS = (SWA, CSA, HCA)
_LAYER_TYPES = {"sliding_attention": SWA, "compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}
_MLP_LAYER_TYPES = {"hash_moe": True, "moe": False}

ALIASES = {
    "hidden_size": ("hidden_size", "dim"),
    "num_layers": ("num_hidden_layers", "n_layers"),
    "num_heads": ("num_attention_heads", "n_heads"),
    "rope_head_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "num_hash_layers": ("num_hash_layers", "n_hash_layers"),
    "index_num_heads": ("index_n_heads",),
    "num_experts": ("n_routed_experts",),
    "num_experts_per_token": ("num_experts_per_tok", "n_activated_experts"),
    "num_shared_experts": ("n_shared_experts",),
    "moe_intermediate_size": ("moe_intermediate_size", "moe_inter_dim"),
    "routed_scaling_factor": ("routed_scaling_factor", "route_scale"),
    "scoring_func": ("scoring_func", "score_func"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps"),
    "sliding_window": ("sliding_window", "window_size"),
    "num_mtp_layers": ("num_nextn_predict_layers", "n_mtp_layers"),
}
REQUIRED = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "index_num_heads",
    "index_head_dim",
    "index_topk",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "hc_mult",
    "sliding_window",
    "vocab_size",
)


@dataclass(frozen=True)
class DeepseekV4Config:
    """Names and meanings as in the technical report; sizes are counts of elements, `compress_ratios` tokens per entry.

    `compress_ratios[layer]`: 0 SWA, 4 CSA, 128 HCA. `hash_layers[layer]`: experts chosen by token id.
    `swiglu_limit` None: no clipping. `index_hadamard`: the indexer rotates q and k; one switch for both sides.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    compress_ratios: tuple[int, ...]
    hash_layers: tuple[bool, ...]
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    scoring_func: str
    swiglu_limit: float | None
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling | None
    max_position_embeddings: int
    num_mtp_layers: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    index_hadamard: bool
    quantization: Quantization | None

    @property
    def num_hash_layers(self) -> int:
        return sum(self.hash_layers)

    @property
    def nope_head_dim(self) -> int:
        return self.head_dim - self.rope_head_dim


def read_deepseek_v4(keys: Keys) -> DeepseekV4Config:
    """Raises UserError, one line, for what is missing, inconsistent, or of an architecture this model does not have."""
    keys.require(REQUIRED)
    num_layers = keys.integer("num_layers")
    num_mtp_layers = keys.integer("num_mtp_layers", 0, minimum=0)
    rope_theta, compress_rope_theta, rope_scaling = _rope(keys)
    config = DeepseekV4Config(
        hidden_size=keys.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=keys.integer("num_heads"),
        head_dim=keys.integer("head_dim"),
        rope_head_dim=_rope_head_dim(keys),
        q_lora_rank=keys.integer("q_lora_rank"),
        o_lora_rank=keys.integer("o_lora_rank"),
        o_groups=keys.integer("o_groups"),
        compress_ratios=_compress_ratios(keys, num_layers, num_mtp_layers),
        hash_layers=_hash_layers(keys, num_layers),
        index_num_heads=keys.integer("index_num_heads"),
        index_head_dim=keys.integer("index_head_dim"),
        index_topk=keys.integer("index_topk"),
        num_experts=keys.integer("num_experts"),
        num_experts_per_token=keys.integer("num_experts_per_token"),
        num_shared_experts=keys.integer("num_shared_experts"),
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        norm_topk_prob=keys.boolean("norm_topk_prob", True),
        scoring_func=keys.choice("scoring_func", "sqrtsoftplus", ("sqrtsoftplus", "sigmoid", "softmax")),
        swiglu_limit=keys.number("swiglu_limit") if keys.get("swiglu_limit") else None,
        hc_mult=keys.integer("hc_mult"),
        hc_sinkhorn_iters=keys.integer("hc_sinkhorn_iters", 20),
        hc_eps=keys.number("hc_eps", 1e-6),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        sliding_window=keys.integer("sliding_window"),
        rope_theta=rope_theta,
        compress_rope_theta=compress_rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=_max_position_embeddings(keys, rope_scaling),
        num_mtp_layers=num_mtp_layers,
        vocab_size=keys.integer("vocab_size"),
        bos_token_id=keys.token_id("bos_token_id"),
        eos_token_ids=keys.token_ids("eos_token_id"),
        pad_token_id=keys.token_id("pad_token_id"),
        index_hadamard=keys.boolean("index_hadamard", True),
        quantization=read_quantization(keys),
    )
    _check(config, keys)
    return config


def _check(config: DeepseekV4Config, keys: Keys) -> None:
    if config.num_heads % config.o_groups:
        raise keys.error("o_groups", config.o_groups, f"a divisor of the {config.num_heads} heads")
    for field, head_dim in (("head_dim", config.head_dim), ("index_head_dim", config.index_head_dim)):
        if head_dim < config.rope_head_dim:
            raise keys.error(field, head_dim, f"at least the {config.rope_head_dim} rotary dimensions")
    keys.check_experts("num_experts", config.num_experts, config.num_layers)
    if config.num_experts_per_token > config.num_experts:
        raise keys.error("num_experts_per_token", config.num_experts_per_token, f"at most {config.num_experts}")
    if config.num_shared_experts != 1:
        raise keys.error("num_shared_experts", config.num_shared_experts, "1")
    if config.index_hadamard and config.index_head_dim & (config.index_head_dim - 1):
        raise keys.error("index_head_dim", config.index_head_dim, "a power of two, or index_hadamard false")
    if keys.integer("num_key_value_heads", 1) != 1:
        raise keys.error("num_key_value_heads", keys.get("num_key_value_heads"), "1")
    keys.choice("hidden_act", "silu", ("silu",))
    for field in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if keys.boolean(field, False):
            raise keys.error(field, True, "false")


def _rope_head_dim(keys: Keys) -> int:
    if keys.has("rope_head_dim"):
        rope_head_dim = keys.integer("rope_head_dim")
    elif keys.has("partial_rotary_factor"):
        exact = keys.integer("head_dim") * keys.number("partial_rotary_factor")
        rope_head_dim = round(exact)
        if abs(exact - rope_head_dim) > 1e-3:
            raise keys.error("partial_rotary_factor", keys.get("partial_rotary_factor"), "a whole part of head_dim")
    else:
        raise UserError(f"{keys.source}: missing qk_rope_head_dim or partial_rotary_factor")
    if rope_head_dim < 2 or rope_head_dim % 2:
        raise keys.error("rope_head_dim", rope_head_dim, "an even number of rotary dimensions, at least 2")
    return rope_head_dim


def _compress_ratios(keys: Keys, num_layers: int, num_mtp_layers: int) -> tuple[int, ...]:
    if keys.has("layer_types"):
        field = "layer_types"
        types = keys.sequence(field, tuple(_LAYER_TYPES))
        for layer_type, rate in keys.table("compress_rates").items():
            if _LAYER_TYPES.get(layer_type) != rate:
                raise keys.error("compress_rates", {layer_type: rate}, "4 for CSA and 128 for HCA")
        ratios = [_LAYER_TYPES[t] for t in types]
    elif keys.has("compress_ratios"):
        field = "compress_ratios"
        ratios = keys.sequence(field, COMPRESS_RATIOS)
    else:
        raise UserError(f"{keys.source}: missing compress_ratios or layer_types")
    # DeepSeek's files go on with one entry for each MTP block.
    if not num_layers <= len(ratios) <= num_layers + max(num_mtp_layers, 1):
        raise UserError(f"{keys.source}: {field} has {len(ratios)} entries for {num_layers} layers")
    if any(ratios[num_layers:]):
        raise keys.error(field, ratios[num_layers:], "0 for the MTP block: it attends to its window only")
    return tuple(ratios[:num_layers])


def _hash_layers(keys: Keys, num_layers: int) -> tuple[bool, ...]:
    if keys.has("mlp_layer_types"):
        types = keys.sequence("mlp_layer_types", tuple(_MLP_LAYER_TYPES))
        if len(types) != num_layers:
            raise UserError(f"{keys.source}: mlp_layer_types has {len(types)} entries for {num_layers} layers")
        return tuple(_MLP_LAYER_TYPES[t] for t in types)
    if not keys.has("num_hash_layers"):
        raise UserError(f"{keys.source}: missing num_hash_layers or mlp_layer_types")
    num_hash_layers = keys.integer("num_hash_layers", minimum=0)
    if num_hash_layers > num_layers:
        raise keys.error("num_hash_layers", num_hash_layers, f"at most the {num_layers} layers")
    return tuple(layer < num_hash_layers for layer in range(num_layers))


def _rope(keys: Keys) -> tuple[float, float, YarnScaling | None]:
    """(base on SWA and MTP layers, base on CSA and HCA layers, YaRN of the latter)."""
    parameters = keys.table("rope_parameters")
    main: dict[str, Any] = {}
    if isinstance(parameters.get("main"), dict) and isinstance(parameters.get("compress"), dict):
        main, compress = parameters["main"], parameters["compress"]
        if read_yarn(main, keys.source) is not None:
            raise keys.error("rope_parameters", "yarn for main", "default for main: window layers rotate plainly")
    elif keys.has("rope_factor"):
        # DeepSeek's inference code scales where original_seq_len is above 0.
        scaled = keys.integer("original_seq_len", 0, minimum=0) > 0
        compress = {
            "rope_type": "yarn" if scaled else "default",
            "factor": keys.number("rope_factor"),
            "original_max_position_embeddings": keys.get("original_seq_len"),
            "beta_fast": keys.number("beta_fast", 32.0),
            "beta_slow": keys.number("beta_slow", 1.0),
        }
    else:
        compress = {k: v for k, v in (parameters or keys.table("rope_scaling")).items() if k != "rope_theta"}
    scaling = read_yarn(compress, keys.source)
    if scaling is not None and (scaling.attention_factor or 1.0) != 1.0:
        raise keys.error("rope_parameters", {"attention_factor": scaling.attention_factor}, "1.0")
    bases = Keys(
        {
            "rope_theta": main.get("rope_theta", parameters.get("rope_theta", keys.get("rope_theta"))),
            "compress_rope_theta": compress.get("rope_theta", keys.get("compress_rope_theta")),
        },
        keys.source,
        {},
    )
    bases.require(("rope_theta", "compress_rope_theta"))
    return bases.rope_base("rope_theta"), bases.rope_base("compress_rope_theta"), scaling


def _max_position_embeddings(keys: Keys, scaling: YarnScaling | None) -> int:
    """The context ceiling; DeepSeek's inference file names none, it is what YaRN stretches to."""
    if not keys.has("max_position_embeddings") and scaling is not None:
        return int(scaling.original_max_position_embeddings * scaling.factor)
    keys.require(("max_position_embeddings",))
    return keys.integer("max_position_embeddings")
