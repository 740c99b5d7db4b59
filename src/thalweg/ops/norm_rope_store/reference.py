"""q, kv and index q: norm, rope, quantise, paged write. Plain PyTorch."""

import torch

from thalweg.layouts.index_fp8 import encode
from thalweg.layouts.registry import layout_of
from thalweg.ops.checks import in_pool
from thalweg.ops.rotary import hadamard, rms_norm, rotate


def kv_store(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
) -> None:
    """Latent rows: RMSNorm of the channels that have a norm weight, rope, then the layout's own rounding."""
    normed = norm_weight.numel()
    latent = torch.cat((rms_norm(kv[:, :normed], norm_weight, eps), kv[:, normed:]), dim=1)
    rows = rotate(latent, positions, inverse_frequencies)
    inside = in_pool("norm_rope_store slots", slots, slots >= 0, cache.shape[0] * cache.shape[1])
    layout_of(cache).write(cache, torch.where(inside, slots, -1), rows)


def query(q: torch.Tensor, inverse_frequencies: torch.Tensor, positions: torch.Tensor, eps: float) -> torch.Tensor:
    """Weightless RMSNorm per head, then rope."""
    return rotate(rms_norm(q, None, eps), positions, inverse_frequencies)


def index_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    positions: torch.Tensor,
    rotate_hadamard: bool,
    quantise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rope, Hadamard, e4m3; the scale goes into the head weight, where the ReLU lets a positive factor through."""
    q = rotate(q, positions, inverse_frequencies)
    if rotate_hadamard:
        q = hadamard(q)
    if not quantise:
        return q.float(), weights.clone()  # a registered operation may not return its argument
    codes, scale = encode(q)
    return codes, weights * scale
