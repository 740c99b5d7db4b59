"""Rotary position embedding, RMS norm and Hadamard rotation in plain PyTorch: what the references share.

RoPE is given by `inverse_frequencies` float32 [rope_dim / 2], not by a table: a table would be as long as the ceiling.
The angle is position x inverse frequency in float32, as DeepSeek's own code and transformers form it.
"""

from functools import lru_cache

import torch


def rotate(
    x: torch.Tensor, positions: torch.Tensor, inverse_frequencies: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """Rotates the trailing 2 x len(inverse_frequencies) channels of `x` [T, ..., d], interleaved pairs (2i, 2i + 1).

    positions int [T]; inverse=True rotates back. float64 arithmetic on float32 cos and sin; returns x's dtype.
    """
    angle = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (inverse_frequencies.numel(),)
    cos, sin = angle.cos().double().view(shape), angle.sin().double().view(shape)
    if inverse:
        sin = -sin
    width = 2 * inverse_frequencies.numel()
    pairs = x[..., -width:].double().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, times `weight` [d] if given. float64 inside, x's dtype out."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.double()).to(x.dtype)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Sylvester-Hadamard rotation of the last dimension (a power of two). float64 inside, x's dtype out."""
    return (x.double() @ _hadamard_matrix(x.shape[-1]).to(x.device)).to(x.dtype)


@lru_cache(maxsize=4)
def _hadamard_matrix(size: int) -> torch.Tensor:
    if size & (size - 1):
        raise ValueError(f"Hadamard rotation: got width {size}, needs a power of two")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix * size**-0.5
