"""The MLA family: rows in, hidden states out, logits on demand. One forward for prefill chunks, decode steps and both."""

import torch
from torch.nn import functional

from thalweg.errors import UserError
from thalweg.layouts.sizes import LATENT_DIM, ROPE_DIM
from thalweg.models.batch import RowBatch
from thalweg.models.config_mla import MlaConfig
from thalweg.models.interface import PoolSizes
from thalweg.models.linear import Weights
from thalweg.models.mla.attention import Attention
from thalweg.models.mla.caches import KV_LAYOUTS, allocate, pool_bytes
from thalweg.models.mla.experts import Experts, swiglu
from thalweg.models.mla.step import Step
from thalweg.ops.rotary import rms_norm


class Block:
    """A layer: attention and MLP or experts, each behind its norm and added to the residual. Weights under `model.layers.N`."""

    def __init__(self, config: MlaConfig, dense: bool, weights: Weights) -> None:
        self.eps = config.rms_norm_eps
        self.attention_norm = weights.take("input_layernorm.weight")
        self.mlp_norm = weights.take("post_attention_layernorm.weight")
        self.attention = Attention(config, weights.scope("self_attn"))
        self.mlp = swiglu(weights.scope("mlp")) if dense else Experts(config, weights.scope("mlp"))

    def __call__(self, x: torch.Tensor, step: Step, cache: torch.Tensor) -> torch.Tensor:
        """x [T, D] -> [T, D]."""
        x = x + self.attention(rms_norm(x, self.attention_norm, self.eps), step, cache)
        return x + self.mlp(rms_norm(x, self.mlp_norm, self.eps))


class MlaModel:
    """Weights by the names of the released deepseek_v3 files; every one is taken, and one left over is an error.

    Raises UserError where the latent is none that the caches hold (512 channels and 64 rotary ones).
    """

    def __init__(self, config: MlaConfig, weights: Weights) -> None:
        if (config.kv_lora_rank, config.qk_rope_head_dim) != (LATENT_DIM, ROPE_DIM):
            raise UserError(
                f"kv_lora_rank {config.kv_lora_rank} and qk_rope_head_dim {config.qk_rope_head_dim}: "
                f"possible are {LATENT_DIM} and {ROPE_DIM}, as the cache formats hold them"
            )
        self.config = config
        self.embedding = weights.embedding("model.embed_tokens")
        self.blocks = [
            Block(config, layer < config.first_k_dense_replace, weights.scope(f"model.layers.{layer}"))
            for layer in range(config.num_layers)
        ]
        self.norm, self.lm_head = weights.take("model.norm.weight"), weights.linear("lm_head")
        if weights.tensors:
            raise ValueError(f"weights that the model does not know: {sorted(weights.tensors)[:5]}")

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def kv_layouts(self) -> tuple[str, ...]:
        """What `allocate` takes, the one to serve with first."""
        return KV_LAYOUTS

    @property
    def window(self) -> None:
        """Every row sees every token before it."""
        return None

    def pool_bytes(self, pool: PoolSizes, kv_layout: str) -> int:
        """What `allocate` takes of memory, in bytes."""
        return pool_bytes(self.config, pool.pages, kv_layout)

    def allocate(self, pool: PoolSizes, kv_layout: str = "mla_bf16") -> list[torch.Tensor]:
        """Zeroed caches of every layer on the model's device; kv_layout `mla_bf16` or `exact`."""
        return allocate(self.config, pool.pages, kv_layout, self.device)

    def carry_out(self, caches: list[torch.Tensor], state_slot: int) -> None:
        """Nothing: everything a request has is in its pages."""

    def carry_in(self, caches: list[torch.Tensor], state_slot: int, carried: None) -> None:
        """Nothing to give."""

    def forward(self, batch: RowBatch, caches: list[torch.Tensor]) -> torch.Tensor:
        """Hidden states [T, D] after the last layer, before the last norm; writes the rows into the caches."""
        x = functional.embedding(batch.tokens, self.embedding)
        step = Step(batch)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, step, cache)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of hidden [rows, D]: give only the rows that are sampled."""
        return self.lm_head(rms_norm(hidden, self.norm, self.config.rms_norm_eps)).float()
