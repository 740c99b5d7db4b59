"""Inverse frequencies of rotary position embedding, plain and YaRN (arXiv 2309.00071)."""

import math

import torch


def plain_inverse_frequencies(dim: int, base: float) -> torch.Tensor:
    """base^(-2i/dim) for i < dim/2, float32 [dim / 2]."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def yarn_inverse_frequencies(
    dim: int, base: float, factor: float, original_length: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
    """YaRN: dimensions that turn often inside `original_length` stay, those that turn less than once are divided by `factor`.

    The blend between them is linear from floor to ceil of the dimensions that turn beta_fast and beta_slow times. float32
    [dim / 2]; no magnitude scale here: the model applies one if its design has one.
    """

    def dimension(turns: float) -> float:
        return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(beta_fast)), 0)
    high = min(math.ceil(dimension(beta_slow)), dim - 1)
    width = max(high - low, 0.001)
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    # In the released modelling code's order of roundings: one ulp of a frequency is 1e-4 in the angle at position 2000.
    kept = 1 - stretched
    turns_per_step = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (factor * turns_per_step) * (1 - kept) + 1.0 / turns_per_step * kept
