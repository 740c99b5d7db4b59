"""Multi-head latent attention in its absorbed form: heads attend to the cached latents, which are never expanded.

A key is k_h = [W_uk_h c, rope], a value v_h = W_uv_h c. So q_h . k_h = (W_uk_h^T q_nope_h) . c + q_rope . rope, and the
sum over values is W_uv_h times the weighted sum of latents. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

import torch

from thalweg.models.config_mla import MlaConfig
from thalweg.models.linear import GroupedLinear, Linear, Weights
from thalweg.models.mla.step import Step
from thalweg.models.rope import plain_inverse_frequencies, yarn_inverse_frequencies
from thalweg.ops import mla_verify, norm_rope_store
from thalweg.ops.rotary import rms_norm, rotate

# The norms of the two latents do not take rms_norm_eps: DeepSeek's code leaves them at their own default.
LATENT_NORM_EPS = 1e-6


class Attention:
    """Weights under `model.layers.N.self_attn`."""

    def __init__(self, config: MlaConfig, weights: Weights) -> None:
        heads, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.num_heads, self.nope_dim, self.scale = heads, nope, config.softmax_scale
        self.q_a: Linear | None = None
        if config.q_lora_rank is not None:
            self.q_a = weights.linear("q_a_proj", bias=config.attention_bias)
            self.q_a_norm = weights.take("q_a_layernorm.weight")
        q_b = weights.take("q_proj.weight" if self.q_a is None else "q_b_proj.weight").unflatten(
            0, (heads, nope + rope)
        )
        q_b = torch.cat((q_b[:, :nope], _rotary_rows(q_b[:, nope:], config)), dim=1).flatten(0, 1)
        self.q_b = Linear(q_b, weights.batch_invariant)
        self.kv_a = _kv_a(config, weights)
        self.kv_a_norm = weights.take("kv_a_layernorm.weight")
        kv_b = weights.take("kv_b_proj.weight").unflatten(0, (heads, nope + config.v_head_dim))
        self.absorb = GroupedLinear(kv_b[:, :nope].transpose(1, 2).flatten(0, 1), heads, weights.batch_invariant)
        self.expand = GroupedLinear(kv_b[:, nope:].flatten(0, 1), heads, weights.batch_invariant)
        self.o = weights.linear("o_proj", bias=config.attention_bias)
        self.inverse_frequencies = inverse_frequencies(config).to(self.kv_a_norm.device)

    def __call__(self, x: torch.Tensor, step: Step, cache: torch.Tensor) -> torch.Tensor:
        """x [T, D], the normalised input -> [T, D]. Rows are stored first: a row reads only what the cache holds."""
        positions = step.batch.positions
        norm_rope_store(
            self.kv_a(x),
            self.kv_a_norm,
            self.inverse_frequencies,
            positions,
            cache,
            step.slots,
            eps=LATENT_NORM_EPS,
        )
        q = x if self.q_a is None else rms_norm(self.q_a(x), self.q_a_norm, LATENT_NORM_EPS)
        q = self.q_b(q).unflatten(1, (self.num_heads, -1))
        q = rotate(q, positions, self.inverse_frequencies)
        q = torch.cat((self.absorb(q[..., : self.nope_dim]), q[..., self.nope_dim :]), dim=-1)
        latent = q.new_empty(*q.shape[:2], self.kv_a_norm.numel())
        for group in step.groups:
            latent[group.rows], _ = mla_verify(
                q[group.rows], cache, group.page_table, group.prefix_lengths, group.parents, scale=self.scale
            )
        return self.o(self.expand(latent).flatten(1))


def inverse_frequencies(config: MlaConfig) -> torch.Tensor:
    """float32 [qk_rope_head_dim / 2], with YaRN where the config has it."""
    scaling = config.rope_scaling
    if scaling is None:
        return plain_inverse_frequencies(config.qk_rope_head_dim, config.rope_theta)
    return yarn_inverse_frequencies(
        config.qk_rope_head_dim,
        config.rope_theta,
        scaling.factor,
        scaling.original_max_position_embeddings,
        scaling.beta_fast,
        scaling.beta_slow,
    )


def _kv_a(config: MlaConfig, weights: Weights) -> Linear:
    """The projection to one latent and one rotary key for all heads."""

    def arrange(rows: torch.Tensor) -> torch.Tensor:
        latent, rotary = rows.split((config.kv_lora_rank, config.qk_rope_head_dim))
        return torch.cat((latent, _rotary_rows(rotary, config)))

    weight = arrange(weights.take("kv_a_proj_with_mqa.weight"))
    if not config.attention_bias:
        return Linear(weight, weights.batch_invariant)
    bias = arrange(weights.take("kv_a_proj_with_mqa.bias").unsqueeze(1)).squeeze(1)
    return Linear(weight, weights.batch_invariant, bias)


def _rotary_rows(rows: torch.Tensor, config: MlaConfig) -> torch.Tensor:
    """Rows [..., rope, in] of a projection to rotary channels, so that their pairs are neighbours (2i, 2i + 1).

    YaRN's magnitude goes into them too: rotation is linear, and all released files of the family have magnitude 1.
    """
    if not config.rope_interleave:
        rows = rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)
    return rows * config.rope_magnitude
