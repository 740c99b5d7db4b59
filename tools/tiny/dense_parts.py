"""Building blocks of the dense model: norms, rotary position, hyper-connections, compressors.

Everything here is differentiable and sees whole sequences [batch, time, ...]. Statistics, softmaxes and the
hyper-connections are computed in float32 whatever the autocast dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny.tiny_config import TinyConfig

NEGATIVE = -1e30  # stands for minus infinity where a whole row may be masked: no NaN


class Fusible:
    """A function that torch.compile fuses while `Fusible.enabled`, and that runs as it is otherwise.

    Only the memory-bound parts are wrapped: compiling whole blocks would take longer than it saves in a short run.
    """

    enabled = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self.fused: Callable[..., Any] | None = None
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        if not Fusible.enabled:
            return self.plain(*arguments)
        if self.fused is None:
            self.fused = torch.compile(self.plain, dynamic=False)
        return self.fused(*arguments)

    @staticmethod
    @contextmanager
    def plain_only() -> Iterator[None]:
        """No compilation inside: for shapes that are seen a few times only."""
        before, Fusible.enabled = Fusible.enabled, False
        try:
            yield
        finally:
            Fusible.enabled = before


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which matrix products keep float32 (or TF32) although autocast is on outside."""
    return torch.autocast(device_type=x.device.type, enabled=False)


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@Fusible
def weighted_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of rows [N, width] with a weight per channel, in float32, returned in the input's dtype."""
    return (rms_normalise(x, eps) * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """Weighted RMS norm over the last axis; returns the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return weighted_rms(x.flatten(0, -2), self.weight, self.eps).view(x.shape)


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


@Fusible
def normalise_and_rotate(q: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Weightless RMS norm per head, then RoPE: queries [B, T, H, d], tables [T, 1, rope / 2]."""
    return rotate(rms_normalise(q, eps).to(q.dtype), cos, sin)


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
    """Almost doubly stochastic matrices from logits [..., n, n]: row softmax, columns, then (row, column) turns."""
    matrix = torch.softmax(logits, dim=-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


@Fusible
def hyper_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of streams [N, n, D]: u = sum_i pre_i X_i [N, D], post [N, n] and the logits of C [N, n, n]."""
    n = streams.shape[-2]
    with without_autocast(streams):
        mixes = F.linear(rms_normalise(streams.flatten(-2), norm_eps), fn)
        pre = torch.sigmoid(scale[0] * mixes[..., :n] + base[:n]) + eps
        post = 2.0 * torch.sigmoid(scale[1] * mixes[..., n : 2 * n] + base[n : 2 * n])
        logits = (scale[2] * mixes[..., 2 * n :] + base[2 * n :]).unflatten(-1, (n, n))
        return (pre.unsqueeze(-1) * streams).sum(-2), post, logits


def hyper_pre(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, c: TinyConfig) -> tuple[Tensor, Tensor, Tensor]:
    """For streams [B, T, n, D]: the block's input u [B, T, D]; post [N, n] and C [N, n, n] of the N = B T tokens."""
    u, post, logits = hyper_weights(streams.flatten(0, 1), fn, base, scale, c.rms_norm_eps, c.hc_eps)
    normalise = sinkhorn
    if Fusible.enabled and streams.is_cuda:
        # Forty dependent reductions over four numbers are launch-bound in any generated form: one kernel instead.
        from tools.tiny.sinkhorn_kernel import sinkhorn as normalise
    return u.unflatten(0, streams.shape[:2]), post, normalise(logits, c.hc_sinkhorn_iters, c.hc_eps)


@Fusible
def write_streams(block_output: Tensor, streams: Tensor, post: Tensor, residual_mix: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i C_ij X_i for y [N, D], X [N, n, D]: C is contracted over its first (row) axis."""
    written = post.unsqueeze(-1) * block_output.float().unsqueeze(-2)
    for i in range(streams.shape[-2]):
        written = written + residual_mix[:, i, :, None] * streams[:, i, None, :]
    return written


def hyper_post(block_output: Tensor, streams: Tensor, post: Tensor, residual_mix: Tensor) -> Tensor:
    """The streams [B, T, n, D] after a block whose output is [B, T, D]; post and C as hyper_pre gave them."""
    written = write_streams(block_output.flatten(0, 1), streams.flatten(0, 1), post, residual_mix)
    return written.view(streams.shape)


@Fusible
def collapse_streams(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float) -> Tensor:
    """sum_i pre_i X_i [N, D] of streams [N, n, D]."""
    with without_autocast(streams):
        mixes = F.linear(rms_normalise(streams.flatten(-2), norm_eps), fn)
        pre = torch.sigmoid(scale * mixes + base) + eps
        return (pre.unsqueeze(-1) * streams).sum(-2)


def hyper_head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, c: TinyConfig) -> Tensor:
    """The collapse [B, T, D] of the streams before a final norm and head: pre weights only."""
    collapsed = collapse_streams(streams.flatten(0, 1), fn, base, scale, c.rms_norm_eps, c.hc_eps)
    return collapsed.unflatten(0, streams.shape[:2])


@Fusible
def pool(kv: Tensor, gate: Tensor) -> Tensor:
    """Softmax of gate over the slots, per channel, as weights of kv: [N, slots, width] both -> float32 [N, width]."""
    return (torch.softmax(gate, dim=1) * kv.float()).sum(1)


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
        pooled = pool(kv.flatten(0, 1), gate.flatten(0, 1)).unflatten(0, kv.shape[:2])
        positions = torch.arange(entries, device=x.device) * self.ratio
        cos, sin = rotary_tables(positions, self.c.compress_rope_theta, self.c.qk_rope_head_dim)
        return rotate(self.norm(pooled), cos, sin).to(kv.dtype)

    def _overlap(self, slots: Tensor, outside: float) -> Tensor:
        """Entry w sees window w - 1 through the first half of the channels and window w through the second."""
        previous = F.pad(slots[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=outside)
        return torch.cat((previous[:, : slots.shape[1]], slots[..., self.width :]), dim=2)
