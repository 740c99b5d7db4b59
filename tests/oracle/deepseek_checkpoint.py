"""A random checkpoint in DeepSeek's own naming, with an MTP block: for what transformers lacks."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from thalweg.models.config import DeepseekV4Config, read_config
from thalweg.models.weights.expected import Kind, expected_tensors

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 48,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 0],  # one more than layers: the MTP block's
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 16,
    "hc_mult": 4,
}


def write_checkpoint(
    folder: Path, *, hadamard: bool, seed: int = 0
) -> tuple[DeepseekV4Config, dict[str, torch.Tensor]]:
    """The configuration as read back, and the tensors that were written."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"index_hadamard": hadamard}))
    config = read_config(folder)
    assert isinstance(config, DeepseekV4Config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(name, expected.shape, expected.kind is Kind.INTEGER, generator)
        for name, expected in expected_tensors(config, mtp=True).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


def _random(name: str, shape: tuple[int, ...], integer: bool, generator: torch.Generator) -> torch.Tensor:
    """Values large enough that every part matters."""
    if integer:
        rows = [torch.randperm(CONFIG["n_routed_experts"], generator=generator)[: shape[1]] for _ in range(shape[0])]
        return torch.stack(rows)
    if name.endswith(("norm.weight", "scale")):
        return torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
    if name.endswith(("attn_sink", "bias", "base", "ape")):
        return 0.5 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
