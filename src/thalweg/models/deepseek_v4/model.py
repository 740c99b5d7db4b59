"""DeepSeek-V4: rows in, residual streams out, logits on demand. One forward for prefill chunks, decode steps and both."""

import torch
from torch.nn import functional

from thalweg.errors import UserError
from thalweg.layouts.sizes import INDEX_DIM, LATENT_DIM
from thalweg.models.batch import RowBatch
from thalweg.models.config_deepseek_v4 import DeepseekV4Config
from thalweg.models.deepseek_v4.block import Block, run_blocks
from thalweg.models.deepseek_v4.caches import KV_LAYOUTS, LayerCaches, allocate, carry_in, carry_out, pool_bytes
from thalweg.models.deepseek_v4.step import Step
from thalweg.models.interface import PoolSizes
from thalweg.models.linear import Linear, Weights
from thalweg.ops import mhc_head
from thalweg.ops.rotary import rms_norm


class Head:
    """Streams to logits: hyper-connection head, RMSNorm, LM head. The MTP block has its own first two."""

    def __init__(self, config: DeepseekV4Config, weights: Weights, lm_head: Linear) -> None:
        self.norm_eps, self.hc_eps = config.rms_norm_eps, config.hc_eps
        self.fn, self.scale, self.base = (weights.take(f"hc_head_{part}").float() for part in ("fn", "scale", "base"))
        self.norm, self.lm_head = weights.take("norm.weight"), lm_head

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, n, D] -> float32 [T, vocabulary]."""
        x = mhc_head(streams, self.fn, self.scale, self.base, norm_eps=self.norm_eps, hc_eps=self.hc_eps)
        return self.lm_head(rms_norm(x, self.norm, self.norm_eps)).float()


class MtpBlock:
    """Multi-token prediction: from the streams at t and the token at t + 1, the logits of t + 2. Weights under `mtp.N`."""

    def __init__(self, config: DeepseekV4Config, weights: Weights, lm_head: Linear) -> None:
        self.eps = config.rms_norm_eps
        self.e_proj, self.h_proj = weights.linear("e_proj"), weights.linear("h_proj")
        self.enorm, self.hnorm = weights.take("enorm.weight"), weights.take("hnorm.weight")
        self.block = Block(config, 0, False, weights)
        self.head = Head(config, weights, lm_head)

    def join(self, streams: torch.Tensor, embedded_next: torch.Tensor) -> torch.Tensor:
        """[T, n, D] streams of the row and [T, D] embedding of the next token -> [T, n, D]."""
        embedded = self.e_proj(rms_norm(embedded_next, self.enorm, self.eps))
        return embedded.unsqueeze(1) + self.h_proj(rms_norm(streams, self.hnorm, self.eps))


class DeepseekV4Model:
    """Weights by DeepSeek's names; every one is taken, and one left over is an error. mtp: with the MTP blocks.

    Raises UserError where the heads are none that the caches hold (latent 512, index 128).
    """

    def __init__(self, config: DeepseekV4Config, weights: Weights, *, mtp: bool = False) -> None:
        if (config.head_dim, config.index_head_dim) != (LATENT_DIM, INDEX_DIM):
            raise UserError(
                f"head_dim {config.head_dim} and index_head_dim {config.index_head_dim}: "
                f"possible are {LATENT_DIM} and {INDEX_DIM}, as the cache formats hold them"
            )
        self.config = config
        self.embedding = weights.embedding("embed")
        lm_head = weights.linear("head")
        self.blocks = [
            Block(config, ratio, config.hash_layers[layer], weights.scope(f"layers.{layer}"))
            for layer, ratio in enumerate(config.compress_ratios)
        ]
        self.head = Head(config, weights, lm_head)
        num_mtp = config.num_mtp_layers if mtp else 0
        self.mtp = [MtpBlock(config, weights.scope(f"mtp.{n}"), lm_head) for n in range(num_mtp)]
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
    def window(self) -> int:
        """Tokens that a row sees directly, itself included."""
        return self.config.sliding_window

    def pool_bytes(self, pool: PoolSizes, kv_layout: str) -> int:
        """What `allocate` takes of memory, in bytes."""
        return pool_bytes(self.config, pool, kv_layout, num_mtp=len(self.mtp))

    def allocate(self, pool: PoolSizes, kv_layout: str = "v4") -> list[LayerCaches]:
        """Zeroed caches of every layer on the model's device; kv_layout `v4` (with `index_fp8`) or `exact`."""
        return allocate(self.config, pool, kv_layout, self.device, num_mtp=len(self.mtp))

    def carry_out(self, caches: list[LayerCaches], state_slot: int) -> list[torch.Tensor]:
        """A copy of a request's compressor rows that a 256-token boundary leaves open: the four c4 rows before it."""
        return carry_out(caches, state_slot)

    def carry_in(self, caches: list[LayerCaches], state_slot: int, carried: list[torch.Tensor]) -> None:
        """Gives a request, at that boundary, the rows that `carry_out` copied."""
        carry_in(caches, state_slot, carried)

    def forward(self, batch: RowBatch, caches: list[LayerCaches]) -> torch.Tensor:
        """The residual streams [T, n, D] after the last layer; writes the rows into the caches."""
        embedded = functional.embedding(batch.tokens, self.embedding)
        streams = embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        step = Step(batch, self.config.sliding_window)
        return run_blocks(self.config, self.blocks, streams, step, caches[: len(self.blocks)])

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of streams [rows, n, D]: give only the rows that are sampled."""
        return self.head(streams)

    def mtp_logits(
        self,
        streams: torch.Tensor,
        next_tokens: torch.Tensor,
        batch: RowBatch,
        caches: list[LayerCaches],
        depth: int = 0,
    ) -> torch.Tensor:
        """float32 [T, vocabulary]: logits of the token after next, from streams [T, n, D] of `batch`'s rows.

        next_tokens int64 [T]: the token at position + 1 of each row. Writes the rows into the MTP block's own window cache.
        """
        mtp = self.mtp[depth]
        joined = mtp.join(streams, functional.embedding(next_tokens, self.embedding))
        step = Step(batch, self.config.sliding_window)
        out = run_blocks(self.config, [mtp.block], joined, step, [caches[len(self.blocks) + depth]])
        return mtp.head(out)
