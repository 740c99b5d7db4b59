"""The part of a DeepSeek-V4 config.json that the dense model needs."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

CONFIG_PATH = Path(__file__).parent / "config.json"


@dataclass(frozen=True)
class TinyConfig:
    """Shapes and constants under the original DeepSeek-V4 key names (see config.json)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    compress_ratios: tuple[int, ...]
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    num_hash_layers: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    num_nextn_predict_layers: int
    bos_token_id: int

    @classmethod
    def from_dict(cls, values: dict) -> "TinyConfig":
        """Picks the fields out of a parsed config.json.

        Raises:
            ValueError: for a setting that the dense model does not implement.
        """
        if values.get("rope_scaling") is not None:
            raise ValueError("the dense model has plain RoPE only: remove rope_scaling from the config")
        required = {"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "n_shared_experts": 1}
        for name, expected in required.items():
            if values.get(name) != expected:
                raise ValueError(f"{name} is {values.get(name)!r}; the dense model implements {expected!r} only")
        if values["num_nextn_predict_layers"] not in (0, 1):
            raise ValueError("the dense model has at most one MTP layer")
        picked = {field.name: values[field.name] for field in fields(cls)}
        picked["compress_ratios"] = tuple(picked["compress_ratios"][: picked["num_hidden_layers"]])
        unknown = set(picked["compress_ratios"]) - {0, 4, 128}
        if unknown or len(picked["compress_ratios"]) != picked["num_hidden_layers"]:
            raise ValueError("compress_ratios must hold 0, 4 or 128 for each of num_hidden_layers layers")
        return cls(**picked)

    @classmethod
    def from_file(cls, path: Path = CONFIG_PATH) -> "TinyConfig":
        """Reads a config.json."""
        return cls.from_dict(json.loads(path.read_text()))
