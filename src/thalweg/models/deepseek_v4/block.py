"""A layer: attention and experts, each behind a hyper-connection site (pre, RMSNorm, block, post)."""

from dataclasses import dataclass

import torch

from thalweg.models.config_deepseek_v4 import DeepseekV4Config
from thalweg.models.deepseek_v4.attention import Attention
from thalweg.models.deepseek_v4.caches import LayerCaches
from thalweg.models.deepseek_v4.experts import Experts
from thalweg.models.deepseek_v4.step import Step
from thalweg.models.linear import Weights
from thalweg.ops import mhc_post, mhc_post_pre_norm, mhc_pre
from thalweg.ops.rotary import rms_norm


@dataclass(frozen=True)
class Site:
    """The mixing weights in front of one block, and the norm of its input."""

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm: torch.Tensor


class Block:
    """Weights under `layers.N` (or `mtp.N`)."""

    def __init__(self, config: DeepseekV4Config, ratio: int, hash_routed: bool, weights: Weights) -> None:
        self.attention_site, self.experts_site = _site(weights, "attn"), _site(weights, "ffn")
        self.attention = Attention(config, ratio, weights.scope("attn"))
        self.experts = Experts(config, hash_routed, weights.scope("ffn"))


def run_blocks(
    config: DeepseekV4Config, blocks: list[Block], streams: torch.Tensor, step: Step, caches: list[LayerCaches]
) -> torch.Tensor:
    """streams [T, n, D] through `blocks`, each with its caches -> [T, n, D].

    Between two sites one operation does post of the block behind and pre and norm of the block ahead.
    """
    norm_eps, hc_eps, iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    sites = [site for block in blocks for site in (block.attention_site, block.experts_site)]
    first = sites[0]
    u, post, comb = mhc_pre(
        streams, first.fn, first.scale, first.base, norm_eps=norm_eps, hc_eps=hc_eps, iterations=iterations
    )
    u = rms_norm(u, first.norm, norm_eps)
    for number in range(len(sites)):
        block = blocks[number // 2]
        y = block.experts(u, step.batch.tokens) if number % 2 else block.attention(u, step, caches[number // 2])
        if number + 1 == len(sites):
            break
        ahead = sites[number + 1]
        streams, u, post, comb = mhc_post_pre_norm(
            y,
            streams,
            post,
            comb,
            ahead.fn,
            ahead.scale,
            ahead.base,
            ahead.norm,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            iterations=iterations,
        )
    return mhc_post(y, streams, post, comb)


def _site(weights: Weights, name: str) -> Site:
    fn, scale, base = (weights.take(f"hc_{name}_{part}").float() for part in ("fn", "scale", "base"))
    return Site(fn, scale, base, weights.take(f"{name}_norm.weight"))
