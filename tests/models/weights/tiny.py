"""Tiny checkpoints, written with a safetensors writer of the test's own (it knows e8m0, and how to be wrong)."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from thalweg.models.weights.expected import Expected, Kind

V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 48,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "max_position_embeddings": 4096,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "hc_mult": 4,
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
}
# name -> (safetensors dtype, shape, bytes)
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def random_tensors(expected: dict[str, Expected], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 4, tensor.shape, generator=generator)
        if tensor.kind is Kind.INTEGER
        else torch.randn(tensor.shape, generator=generator)
        for name, tensor in expected.items()
    }


def stored(tensors: dict[str, torch.Tensor]) -> Stored:
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32"}
    return {
        name: (names[t.dtype], tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def raw(dtype: str, shape: tuple[int, ...], data: bytes | torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return dtype, shape, data if isinstance(data, bytes) else data.contiguous().numpy().tobytes()


def write_safetensors(file: Path, tensors: Stored) -> None:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(folder: Path, config: dict[str, Any], tensors: Stored, shards: int = 1) -> Path:
    """A checkpoint folder: one file, or `shards` of them with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names, weight_map = list(tensors), {}
    size = math.ceil(len(names) / shards)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard * size : (shard + 1) * size]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
