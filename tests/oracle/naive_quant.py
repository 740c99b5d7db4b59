"""The formats of a quantised cache as plain arithmetic on float64 values: what a reader gets back, no bytes."""

import torch

MAX_E4M3 = 448.0


def round_mantissa(x: torch.Tensor, bits: int, least_exponent: int) -> torch.Tensor:
    """x to the nearest binary number of `bits` stored mantissa bits, ties to even; below 2^least_exponent, subnormal."""
    exponent = torch.frexp(x).exponent - 1  # |x| = m 2^exponent with 1 <= m < 2
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=least_exponent) - bits)
    return torch.round(x / step) * step


def bf16(x: torch.Tensor) -> torch.Tensor:
    return round_mantissa(x, bits=7, least_exponent=-126)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return round_mantissa(x.clamp(-MAX_E4M3, MAX_E4M3), bits=3, least_exponent=-6)


def float32_scale(x: torch.Tensor) -> torch.Tensor:
    """max(amax, 1e-4) / 448 over the last dimension, a float32 number. [..., 1]"""
    return (x.abs().amax(-1, keepdim=True).clamp(min=1e-4).float() / MAX_E4M3).double()


def power_of_two_scale(x: torch.Tensor) -> torch.Tensor:
    """max(amax, 1e-4) / 448 over the last dimension, rounded up to a power of two. [..., 1]"""
    mantissa, exponent = torch.frexp(x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / MAX_E4M3)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def v4_row(row: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """A row of the `v4` cache as read back: all but rope_dim in e4m3 under a power of two per 64, the rest in bf16."""
    nope = row[..., :-rope_dim].unflatten(-1, (-1, 64))
    scale = power_of_two_scale(nope)
    return torch.cat([(e4m3(nope / scale) * scale).flatten(-2), bf16(row[..., -rope_dim:])], dim=-1)


def index_row(row: torch.Tensor) -> torch.Tensor:
    """An index key (or one head of an index query) as read back: e4m3 under one float32 scale."""
    scale = float32_scale(row)
    return e4m3(row / scale) * scale


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x times the Hadamard matrix of Sylvester's construction, over sqrt(n): orthogonal and symmetric."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return x @ matrix / x.shape[-1] ** 0.5
