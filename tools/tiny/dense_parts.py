"""Building blocks of the dense model: norms, rotary position, hyper-connections, compressors.

Everything here is differentiable and sees whole sequences [batch, time, ...]. Statistics, softmaxes and the
hyper-connections are computed in float32 whatever the autocast dtype.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny.tiny_config import TinyConfig

NEGATIVE = -1e30  # stands for minus infinity where a whole row may be masked: no NaN


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which matrix products keep float32 (or TF32) although autocast is on outside."""
    return torch.autocast(device_type=x.device.type, enabled=False)


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Weighted RMS norm over the last axis; returns the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (rms_normalise(x, self.eps) * self.weight).to(x.dtype)


def rotary_tables(positions: Tensor, theta: float, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, width / 2], of plain RoPE with base theta."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    angles = positions.float()[:, None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last 2 * cos.shape[-1] channels of x as interleaved pairs; the rest stays as it is.

    cos and sin must broadcast against x[..., 0::2] of the rotated part. Minus sin rotates back.
    """
    width = 2 * cos.shape[-1]
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], rotated.to(x.dtype)), dim=-1)


def quantise_like_cache(rows: Tensor, rope_width: int) -> Tensor:
    """What the v4 cache gives back for latent rows [..., d]; the gradient passes straight through.

    The first d - rope_width channels become e4m3 with one power-of-two scale per 64, the rest bfloat16.
    """
    nope = rows[..., :-rope_width].detach().float().unflatten(-1, (-1, 64))
    largest = nope.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448.0)))
    nope = (nope / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale
    rope = rows[..., -rope_width:].detach().to(torch.bfloat16).float()
    stored = torch.cat((nope.flatten(-2), rope), dim=-1).to(rows.dtype)
    return rows + (stored - rows.detach())


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Almost doubly stochastic matrices from logits [..., n, n]: row softmax, then columns, then (row, column) turns."""
    matrix = torch.softmax(logits, dim=-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def hyper_pre(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, c: TinyConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The block's input u = sum_i pre_i X_i [B, T, D] and the weights post [B, T, n] and C [B, T, n, n]."""
    n = c.hc_mult
    with without_autocast(streams):
        mixes = F.linear(rms_normalise(streams.flatten(-2), c.rms_norm_eps), fn)
        pre = torch.sigmoid(scale[0] * mixes[..., :n] + base[:n]) + c.hc_eps
        post = 2.0 * torch.sigmoid(scale[1] * mixes[..., n : 2 * n] + base[n : 2 * n])
        logits = (scale[2] * mixes[..., 2 * n :] + base[2 * n :]).unflatten(-1, (n, n))
        residual_mix = sinkhorn(logits, c.hc_sinkhorn_iters, c.hc_eps)
        return (pre.unsqueeze(-1) * streams).sum(-2), post, residual_mix


def hyper_post(block_output: Tensor, streams: Tensor, post: Tensor, residual_mix: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i C_ij X_i: C is contracted over its first (row) axis."""
    with without_autocast(streams):
        mixed = torch.matmul(residual_mix.transpose(-1, -2), streams)
        return mixed + post.unsqueeze(-1) * block_output.float().unsqueeze(-2)


def hyper_head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, c: TinyConfig) -> Tensor:
    """The collapse of the streams before a final norm and head: pre weights only."""
    with without_autocast(streams):
        mixes = F.linear(rms_normalise(streams.flatten(-2), c.rms_norm_eps), fn)
        pre = torch.sigmoid(scale * mixes + base) + c.hc_eps
        return (pre.unsqueeze(-1) * streams).sum(-2)


class Compressor(nn.Module):
    """4:1 (overlapping) or 128:1 compression of hidden states [B, T, D] into [B, T // ratio, width] latent entries."""

    def __init__(self, c: TinyConfig, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width, self.c = ratio, width, c
        channels = 2 * width if ratio == 4 else width
        self.ape = nn.Parameter(torch.zeros(ratio, channels))
        self.wkv = nn.Linear(c.hidden_size, channels, bias=False)
        self.wgate = nn.Linear(c.hidden_size, channels, bias=False)
        self.norm = RMSNorm(width, c.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        entries = x.shape[1] // self.ratio
        x = x[:, : entries * self.ratio]
        kv = self.wkv(x).unflatten(1, (entries, self.ratio))
        gate = self.wgate(x).unflatten(1, (entries, self.ratio)).float() + self.ape
        if self.ratio == 4:
            kv, gate = self._overlap(kv, 0.0), self._overlap(gate, float("-inf"))
        pooled = (torch.softmax(gate, dim=2) * kv.float()).sum(2)
        positions = torch.arange(entries, device=x.device) * self.ratio
        cos, sin = rotary_tables(positions, self.c.compress_rope_theta, self.c.qk_rope_head_dim)
        return rotate(self.norm(pooled), cos, sin).to(kv.dtype)

    def _overlap(self, slots: Tensor, outside: float) -> Tensor:
        """Entry w sees window w - 1 through the first half of the channels and window w through the second."""
        previous = F.pad(slots[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=outside)
        return torch.cat((previous[:, : slots.shape[1]], slots[..., self.width :]), dim=2)
