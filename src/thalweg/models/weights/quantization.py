"""Stored weights to floating point, one function a format.

fp8: e4m3 [N, K], one scale (float32 or ue8m0) for a block, 128 x 128 in the releases: `.scale`, `weight_scale_inv`.
MXFP4 (OCP MX): e2m1 [N, K/2] bytes, ue8m0 [N, K/32]. DeepSeek-V4's routed experts are stored so (dtype I8 with an
F8_E8M0 `.scale`), as its inference code declares them: weight [out, in // 2], scale [out, in // 32].
NVFP4: e2m1 [N, K/2] bytes, e4m3 [N, K/16], and one float32 for the tensor, which multiplies as ModelOpt writes it
(`weight_scale_2`) and divides as compressed-tensors does (`weight_global_scale`).
In a byte of e2m1 the even column is in the low nibble. Products are taken in float32.
"""

import torch
from torch import Tensor

MXFP4_BLOCK = 32
NVFP4_BLOCK = 16

# e2m1: sign, two exponent bits (bias 1), one mantissa bit; code 8 is -0.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# ue8m0: a bare exponent; 255 is NaN.
_UE8M0 = (*(2.0 ** (byte - 127) for byte in range(255)), float("nan"))


def decode_ue8m0(scales: Tensor) -> Tensor:
    """uint8 (or float8_e8m0fnu) of any shape -> float32, 2^(byte - 127)."""
    table = torch.tensor(_UE8M0, dtype=torch.float32, device=scales.device)
    return table.index_select(0, scales.view(torch.uint8).int().flatten()).reshape(scales.shape)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 or int8 [..., K/2] -> float32 [..., K]."""
    codes = packed.view(torch.uint8)
    table = torch.tensor(_E2M1, dtype=torch.float32, device=packed.device)
    columns = torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(-2)
    return table.index_select(0, columns.int().flatten()).reshape(columns.shape)


def dequantize_fp8(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float8_e4m3fn [N, K] -> float32. `scales` [ceil(N/rows), ceil(K/columns)]: floating point, or ue8m0 as uint8."""
    rows, columns = block
    spread = _scales_as_float(scales).repeat_interleave(rows, 0)[: weight.shape[0]]
    spread = spread.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return weight.float().mul_(spread)


def dequantize_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """uint8 or int8 [N, K/2], ue8m0 as uint8 [N, K/32] -> float32 [N, K]."""
    return unpack_e2m1(packed).mul_(decode_ue8m0(scales).repeat_interleave(MXFP4_BLOCK, -1))


def dequantize_nvfp4(packed: Tensor, scales: Tensor, factor: Tensor, *, divide: bool) -> Tensor:
    """uint8 [N, K/2], float8_e4m3fn [N, K/16], float32 with one element -> float32 [N, K].

    `divide`: `factor` is compressed-tensors' divisor, not ModelOpt's multiplier.
    """
    # The first product is exact in float32 (2 + 4 significant bits), so the value is rounded once.
    values = unpack_e2m1(packed).mul_(scales.float().repeat_interleave(NVFP4_BLOCK, -1))
    factor = factor.float().reshape(())
    return values.div_(factor) if divide else values.mul_(factor)


def _scales_as_float(scales: Tensor) -> Tensor:
    return decode_ue8m0(scales) if scales.dtype == torch.uint8 else scales.float()
