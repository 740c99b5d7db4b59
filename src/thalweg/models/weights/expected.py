"""Which tensors a model has, under their canonical names, with shapes: derived from the configuration alone. No torch.

Canonical names are DeepSeek's own for DeepSeek-V4 (`layers.0.attn.wq_a.weight`) and those of the released
`deepseek_v3` checkpoints for the MLA family (`model.layers.0.self_attn.q_a_proj.weight`).
"""

from dataclasses import dataclass
from enum import Enum

from thalweg.models.config_deepseek_v4 import CSA, SWA, DeepseekV4Config
from thalweg.models.config_mla import MlaConfig


class Kind(Enum):
    """How a loaded tensor is held: in the requested dtype, in float32 whatever was requested, or as int64."""

    COMPUTE = "compute"
    FLOAT32 = "float32"
    INTEGER = "integer"


@dataclass(frozen=True)
class Expected:
    shape: tuple[int, ...]
    kind: Kind = Kind.COMPUTE


def expected_tensors(config: DeepseekV4Config | MlaConfig, *, mtp: bool = False) -> dict[str, Expected]:
    """Canonical name -> shape and kind. `mtp`: with DeepSeek-V4's MTP blocks, `mtp.0.*`; the MLA family has none."""
    return _deepseek_v4(config, mtp) if isinstance(config, DeepseekV4Config) else _mla(config)


def expected_names(config: DeepseekV4Config | MlaConfig, *, mtp: bool = False) -> list[str]:
    return list(expected_tensors(config, mtp=mtp))


def _float32(*shape: int) -> Expected:
    return Expected(shape, Kind.FLOAT32)


def _deepseek_v4(config: DeepseekV4Config, mtp: bool) -> dict[str, Expected]:
    hidden = config.hidden_size
    tensors = {
        "embed.weight": Expected((config.vocab_size, hidden)),
        "head.weight": Expected((config.vocab_size, hidden)),
        "norm.weight": _float32(hidden),
        **_hc_head(config, ""),
    }
    for layer, ratio in enumerate(config.compress_ratios):
        tensors |= _v4_block(config, f"layers.{layer}.", ratio, config.hash_layers[layer])
    for block in range(config.num_mtp_layers if mtp else 0):
        prefix = f"mtp.{block}."
        tensors |= _v4_block(config, prefix, SWA, hash_routed=False) | _hc_head(config, prefix)
        tensors |= {prefix + name: Expected((hidden, hidden)) for name in ("e_proj.weight", "h_proj.weight")}
        tensors |= {prefix + name: _float32(hidden) for name in ("enorm.weight", "hnorm.weight", "norm.weight")}
    return tensors


def _hc_head(config: DeepseekV4Config, prefix: str) -> dict[str, Expected]:
    streams = config.hc_mult
    return {
        prefix + "hc_head_fn": _float32(streams, streams * config.hidden_size),
        prefix + "hc_head_base": _float32(streams),
        prefix + "hc_head_scale": _float32(1),
    }


def _v4_block(config: DeepseekV4Config, prefix: str, ratio: int, hash_routed: bool) -> dict[str, Expected]:
    hidden, heads, head_dim, streams = config.hidden_size, config.num_heads, config.head_dim, config.hc_mult
    grouped = config.o_groups * config.o_lora_rank
    tensors = {
        "attn_norm.weight": _float32(hidden),
        "ffn_norm.weight": _float32(hidden),
        "attn.wq_a.weight": Expected((config.q_lora_rank, hidden)),
        "attn.q_norm.weight": _float32(config.q_lora_rank),
        "attn.wq_b.weight": Expected((heads * head_dim, config.q_lora_rank)),
        "attn.wkv.weight": Expected((head_dim, hidden)),
        "attn.kv_norm.weight": _float32(head_dim),
        "attn.wo_a.weight": Expected((grouped, heads * head_dim // config.o_groups)),
        "attn.wo_b.weight": Expected((hidden, grouped)),
        "attn.attn_sink": _float32(heads),
        "ffn.gate.weight": Expected((config.num_experts, hidden)),
    }
    for site in ("attn", "ffn"):
        outputs = (2 + streams) * streams
        tensors |= {
            f"hc_{site}_fn": _float32(outputs, streams * hidden),
            f"hc_{site}_base": _float32(outputs),
            f"hc_{site}_scale": _float32(3),
        }
    if ratio != SWA:
        tensors |= _compressor("attn.compressor.", ratio, head_dim, hidden)
    if ratio == CSA:
        index_dim = config.index_head_dim
        tensors |= _compressor("attn.indexer.compressor.", ratio, index_dim, hidden)
        tensors["attn.indexer.wq_b.weight"] = Expected((config.index_num_heads * index_dim, config.q_lora_rank))
        tensors["attn.indexer.weights_proj.weight"] = Expected((config.index_num_heads, hidden))
    if hash_routed:
        tensors["ffn.gate.tid2eid"] = Expected((config.vocab_size, config.num_experts_per_token), Kind.INTEGER)
    else:
        tensors["ffn.gate.bias"] = _float32(config.num_experts)
    for expert in ["shared_experts", *(f"experts.{e}" for e in range(config.num_experts))]:
        tensors |= {
            f"ffn.{expert}.w1.weight": Expected((config.moe_intermediate_size, hidden)),
            f"ffn.{expert}.w2.weight": Expected((hidden, config.moe_intermediate_size)),
            f"ffn.{expert}.w3.weight": Expected((config.moe_intermediate_size, hidden)),
        }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _compressor(prefix: str, ratio: int, head_dim: int, hidden: int) -> dict[str, Expected]:
    # c4 entries overlap: each token writes one half of the channels for its own window, one for the next.
    width = 2 * head_dim if ratio == CSA else head_dim
    return {
        prefix + "ape": _float32(ratio, width),
        prefix + "wkv.weight": Expected((width, hidden)),
        prefix + "wgate.weight": Expected((width, hidden)),
        prefix + "norm.weight": _float32(head_dim),
    }


def _mla(config: MlaConfig) -> dict[str, Expected]:
    hidden = config.hidden_size
    tensors = {
        "model.embed_tokens.weight": Expected((config.vocab_size, hidden)),
        "lm_head.weight": Expected((config.vocab_size, hidden)),
        "model.norm.weight": _float32(hidden),
    }
    for layer in range(config.num_layers):
        block = _mla_attention(config) | {
            "input_layernorm.weight": _float32(hidden),
            "post_attention_layernorm.weight": _float32(hidden),
        }
        if layer < config.first_k_dense_replace:
            block |= _mlp("mlp.", hidden, config.intermediate_size)
        else:
            block["mlp.gate.weight"] = Expected((config.n_routed_experts, hidden))
            block["mlp.gate.e_score_correction_bias"] = _float32(config.n_routed_experts)
            block |= _mlp("mlp.shared_experts.", hidden, config.moe_intermediate_size * config.n_shared_experts)
            for expert in range(config.n_routed_experts):
                block |= _mlp(f"mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


def _mla_attention(config: MlaConfig) -> dict[str, Expected]:
    hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    tensors = {
        "kv_a_proj_with_mqa.weight": Expected((latent + config.qk_rope_head_dim, hidden)),
        "kv_a_layernorm.weight": _float32(latent),
        "kv_b_proj.weight": Expected((heads * (config.qk_nope_head_dim + config.v_head_dim), latent)),
        "o_proj.weight": Expected((hidden, heads * config.v_head_dim)),
    }
    biased = ["kv_a_proj_with_mqa", "o_proj"]
    if config.q_lora_rank is None:
        tensors["q_proj.weight"] = Expected((heads * config.qk_head_dim, hidden))
    else:
        tensors["q_a_proj.weight"] = Expected((config.q_lora_rank, hidden))
        tensors["q_a_layernorm.weight"] = _float32(config.q_lora_rank)
        tensors["q_b_proj.weight"] = Expected((heads * config.qk_head_dim, config.q_lora_rank))
        biased.append("q_a_proj")
    if config.attention_bias:
        tensors |= {f"{name}.bias": Expected(tensors[f"{name}.weight"].shape[:1]) for name in biased}
    return {"self_attn." + name: tensor for name, tensor in tensors.items()}


def _mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, Expected]:
    return {
        prefix + "gate_proj.weight": Expected((intermediate, hidden)),
        prefix + "up_proj.weight": Expected((intermediate, hidden)),
        prefix + "down_proj.weight": Expected((hidden, intermediate)),
    }
