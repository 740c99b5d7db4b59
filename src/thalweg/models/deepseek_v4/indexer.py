"""The lightning indexer: cheap scores of every visible c4 entry, and the few that attention will read."""

import torch

from thalweg.layouts import index_fp8
from thalweg.layouts.registry import layout_of
from thalweg.models.config_deepseek_v4 import CSA, DeepseekV4Config
from thalweg.models.deepseek_v4.caches import LayerCaches, page_slots
from thalweg.models.deepseek_v4.compress import Compressor
from thalweg.models.deepseek_v4.step import Step
from thalweg.models.linear import Weights
from thalweg.ops import index_topk, rope_quantise_index_q


class Indexer:
    """Weights under `layers.N.attn.indexer`. The Hadamard switch is one for queries and keys: it cannot be one-sided."""

    def __init__(self, config: DeepseekV4Config, weights: Weights, inverse_frequencies: torch.Tensor) -> None:
        self.num_heads, self.head_dim, self.topk = config.index_num_heads, config.index_head_dim, config.index_topk
        self.hadamard = config.index_hadamard
        self.inverse_frequencies = inverse_frequencies
        self.wq_b, self.weights_proj = weights.linear("wq_b"), weights.linear("weights_proj")
        self.compressor = Compressor(
            weights.scope("compressor"), CSA, inverse_frequencies, hadamard=self.hadamard, eps=config.rms_norm_eps
        )

    def __call__(self, x: torch.Tensor, q_residual: torch.Tensor, step: Step, caches: LayerCaches) -> torch.Tensor:
        """x [T, D], q_residual [T, q rank] -> int32 [T, k] slots of the main c4 cache, -1 where fewer are visible."""
        assert caches.index_keys is not None and caches.index_state is not None
        self.compressor(x, step.c4_plan, caches.index_state, caches.index_keys)
        q = self.wq_b(q_residual).unflatten(1, (self.num_heads, self.head_dim))
        head_weights = self.weights_proj(x).float() * (self.head_dim**-0.5 * self.num_heads**-0.5)
        q, head_weights = rope_quantise_index_q(
            q,
            head_weights,
            self.inverse_frequencies,
            step.batch.positions,
            hadamard=self.hadamard,
            quantise=layout_of(caches.index_keys) is index_fp8,
        )
        _, slots = index_topk(
            q,
            caches.index_keys,
            head_weights,
            step.c4_lengths,
            step.batch.page_table,
            self.topk,
            step.batch.row_to_request,
            page_slots(CSA),
        )
        return slots
