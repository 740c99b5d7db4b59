"""float8 e4m3 (finite, one NaN code) and ue8m0 scales: the number formats that several layouts share."""

import torch

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4  # clamps the amax, not the scale: a row of zeros gets a valid scale


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounds float32 `values` to the nearest e4m3 (ties to even), saturating at +-448; NaN stays NaN. Any shape."""
    # Clamped by hand: conversion of out-of-range values differs between torch versions and devices.
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def over_e4m3_max(amax: torch.Tensor) -> torch.Tensor:
    """float32 amax / 448, rounded once. By a tensor: by a number torch multiplies by the reciprocal on a GPU, a bit off."""
    return amax / amax.new_full((), E4M3_MAX)


def amax_scale(values: torch.Tensor) -> torch.Tensor:
    """max(|values|, 1e-4) / 448 over the last dimension, float32: the plain fp32 scale of an index key."""
    return over_e4m3_max(values.abs().amax(dim=-1).clamp(min=AMAX_FLOOR))


def ue8m0_ceil(scale: torch.Tensor) -> torch.Tensor:
    """uint8 exponent codes of the smallest powers of two >= `scale` (float32, positive, normal); inf and NaN give 255.

    By the float's bits, because torch's own e8m0 conversion rounds to nearest and log2 is inexact near powers of two.
    """
    bits = scale.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    # Without the clamp a NaN's code would wrap to 0 and turn its whole group into numbers near 2^-127.
    return (exponent + ((bits & 0x7FFFFF) != 0).int()).clamp(max=255).to(torch.uint8)


def ue8m0_value(codes: torch.Tensor) -> torch.Tensor:
    """float32 value 2^(code - 127) of uint8 `codes`; code 255 is NaN."""
    code = codes.int()
    bits = torch.where(code == 0, 1 << 22, code << 23)  # code 0 is 2^-127, a float32 subnormal
    value = bits.view(torch.float32)
    return torch.where(code == 255, torch.full_like(value, float("nan")), value)
