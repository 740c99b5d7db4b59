"""Attention of one layer: a window of recent tokens, and compressed entries chosen by the indexer (CSA) or all (HCA)."""

import torch

from thalweg.models.config_deepseek_v4 import CSA, HCA, DeepseekV4Config
from thalweg.models.deepseek_v4.caches import LayerCaches
from thalweg.models.deepseek_v4.compress import Compressor
from thalweg.models.deepseek_v4.indexer import Indexer
from thalweg.models.deepseek_v4.step import Step
from thalweg.models.linear import GroupedLinear, Weights
from thalweg.models.rope import plain_inverse_frequencies, yarn_inverse_frequencies
from thalweg.ops import norm_rope_q, norm_rope_store, sparse_mla
from thalweg.ops.rotary import rms_norm


class Attention:
    """`ratio` 0: window only. Weights under `layers.N.attn`."""

    def __init__(self, config: DeepseekV4Config, ratio: int, weights: Weights) -> None:
        self.num_heads, self.head_dim, self.groups = config.num_heads, config.head_dim, config.o_groups
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.wq_a, self.wq_b = weights.linear("wq_a"), weights.linear("wq_b")
        self.q_norm, self.kv_norm = weights.take("q_norm.weight"), weights.take("kv_norm.weight")
        self.wkv = weights.linear("wkv")
        self.wo_a = GroupedLinear(weights.take("wo_a.weight"), config.o_groups, weights.batch_invariant)
        self.wo_b = weights.linear("wo_b")
        self.batch_invariant = weights.batch_invariant
        self.sink = weights.take("attn_sink").float()
        self.inverse_frequencies = inverse_frequencies(config, ratio).to(self.sink.device)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        self.ratio = ratio
        if ratio in (CSA, HCA):
            scope = weights.scope("compressor")
            self.compressor = Compressor(scope, ratio, self.inverse_frequencies, hadamard=False, eps=self.eps)
        if ratio == CSA:
            self.indexer = Indexer(config, weights.scope("indexer"), self.inverse_frequencies)

    def __call__(self, x: torch.Tensor, step: Step, caches: LayerCaches) -> torch.Tensor:
        """x [T, D], the normalised input -> [T, D]. Rows are stored first: a row reads only what the cache holds."""
        positions = step.batch.positions
        q_residual = rms_norm(self.wq_a(x), self.q_norm, self.eps)
        q = self.wq_b(q_residual).unflatten(1, (self.num_heads, self.head_dim))
        q = norm_rope_q(q, self.inverse_frequencies, positions, eps=self.eps)
        norm_rope_store(
            self.wkv(x),
            self.kv_norm,
            self.inverse_frequencies,
            positions,
            caches.window,
            step.window_slots,
            eps=self.eps,
        )
        extra = self._compressed(x, q_residual, step, caches)
        out, _ = sparse_mla(
            q,
            caches.window,
            step.window_indices,
            None,
            self.sink,
            extra,
            scale=self.scale,
            # Values carry the rotation of their own position; turning back by t leaves the relative one.
            rotate_back=(positions, self.inverse_frequencies),
            deterministic=self.batch_invariant,
        )
        return self.wo_b(self.wo_a(out.view(x.shape[0], self.groups, -1)).flatten(1))

    def _compressed(
        self, x: torch.Tensor, q_residual: torch.Tensor, step: Step, caches: LayerCaches
    ) -> tuple[torch.Tensor, torch.Tensor, None] | None:
        if self.compressor is None:
            return None
        assert caches.compressed is not None and caches.compressed_state is not None
        plan = step.c4_plan if self.ratio == CSA else step.c128_plan
        self.compressor(x, plan, caches.compressed_state, caches.compressed)
        if self.indexer is None:
            return caches.compressed, step.c128_indices, None
        return caches.compressed, self.indexer(x, q_residual, step, caches), None


def inverse_frequencies(config: DeepseekV4Config, ratio: int) -> torch.Tensor:
    """float32 [rope_head_dim / 2]: plain for window layers; base 1.6e5, with YaRN if configured, for compressed ones."""
    if ratio == 0:
        return plain_inverse_frequencies(config.rope_head_dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return plain_inverse_frequencies(config.rope_head_dim, config.compress_rope_theta)
    return yarn_inverse_frequencies(
        config.rope_head_dim,
        config.compress_rope_theta,
        scaling.factor,
        scaling.original_max_position_embeddings,
        scaling.beta_fast,
        scaling.beta_slow,
    )
