"""Golden values worked out by hand from the formats' definitions, in the comments, not by the code under test."""

import math

import pytest
import torch

from thalweg.models.weights.quantization import (
    decode_ue8m0,
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_nvfp4,
    unpack_e2m1,
)


def u8(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_ue8m0_is_a_bare_exponent_and_255_is_nan():
    # 2^(byte - 127): 127 -> 1, 128 -> 2, 120 -> 1/128, 254 -> 2^127, 0 -> 2^-127 (a float32 subnormal)
    values = decode_ue8m0(u8(127, 128, 120, 254, 0, 255)).tolist()
    assert values[:5] == [1.0, 2.0, 1 / 128, 2.0**127, 2.0**-127]
    assert math.isnan(values[5])
    assert decode_ue8m0(u8(128, 126).view(torch.float8_e8m0fnu)).tolist() == [2.0, 0.5]


def test_e2m1_codes_have_the_even_column_in_the_low_nibble():
    # s eem: 0000 0, 0001 0.5 (subnormal), 0010 1, 0011 1.5, 0100 2, 0101 3, 0110 4, 0111 6; 1xxx the negatives.
    # bytes (high nibble, low nibble): 0x10 -> 0, 0.5; 0x32 -> 1, 1.5; 0x54 -> 2, 3; 0x76 -> 4, 6; 0xF9 -> -0.5, -6
    packed = u8(0x10, 0x32, 0x54, 0x76, 0xF9, 0xDB)
    # 0xDB: low B = 1011 -> -1.5, high D = 1101 -> -3
    assert unpack_e2m1(packed).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6, -1.5, -3]
    assert unpack_e2m1(packed.view(torch.int8)).tolist() == unpack_e2m1(packed).tolist()
    assert math.copysign(1, unpack_e2m1(u8(0x08))[0].item()) == -1  # 1000 is -0


def test_fp8_blocks_carry_one_scale_each_and_the_last_block_may_be_cut():
    # e4m3 (bias 7): 0x38 = 2^0 = 1; 0x40 = 2; 0x3C = 1.5; 0xB8 = -1; 0x7E = 1.75 * 2^8 = 448; 0x01 = 2^-9
    weight = u8(0x38, 0x40, 0x3C, 0xB8, 0x7E, 0x01, 0x38, 0x38, 0x38).reshape(3, 3).view(torch.float8_e4m3fn)
    # blocks of 2 x 2 over 3 x 3: rows 0-1 | 2, columns 0-1 | 2
    scales = torch.tensor([[0.5, 4.0], [8.0, 0.25]])
    # row 0: 1*0.5, 2*0.5, 1.5*4; row 1: -1*0.5, 448*0.5, 2^-9*4; row 2: 1*8, 1*8, 1*0.25
    golden = [[0.5, 1.0, 6.0], [-0.5, 224.0, 2.0**-7], [8.0, 8.0, 0.25]]
    assert dequantize_fp8(weight, scales, (2, 2)).tolist() == golden
    # the same scales as ue8m0 bytes: 2^-1 -> 126, 2^2 -> 129, 2^3 -> 130, 2^-2 -> 125
    assert dequantize_fp8(weight, u8(126, 129, 130, 125).reshape(2, 2), (2, 2)).tolist() == golden


def test_fp8_blocks_of_128_change_scale_at_row_and_column_128():
    weight = torch.ones(130, 257).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    values = dequantize_fp8(weight, scales, (128, 128))
    corners = [values[row, column].item() for row in (127, 128) for column in (127, 128, 255, 256)]
    assert corners == [1, 2, 2, 3, 4, 5, 5, 6]


def test_mxfp4_has_one_power_of_two_for_32_columns():
    # 64 columns: 31 zeros and a last 6 (code 7, high nibble of byte 15), then a first -4 (code 14, low nibble of
    # byte 16) and zeros. Scales 129 -> 4 and 125 -> 1/4: column 31 is 6 * 4 = 24, column 32 is -4 / 4 = -1.
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, 15], packed[0, 16] = 0x70, 0x0E
    values = dequantize_mxfp4(packed, u8(129, 125).reshape(1, 2))
    assert values.shape == (1, 64)
    assert values[0, 31:33].tolist() == [24.0, -1.0]
    assert values.count_nonzero() == 2


@pytest.mark.parametrize(("divide", "factor"), [(False, 0.125), (True, 8.0)])
def test_nvfp4_has_an_e4m3_scale_for_16_columns_and_one_factor_for_all(divide, factor):
    # 32 columns: column 15 = 3 (code 5, high nibble of byte 7), column 16 = -1.5 (code 11, low nibble of byte 8).
    # Scales 0x42 = 1.25 * 2^1 = 2.5 and 0x38 = 1. Factor: times 0.125 (ModelOpt), or divided by 8 (compressed-tensors).
    # Column 15: 3 * 2.5 / 8 = 0.9375; column 16: -1.5 * 1 / 8 = -0.1875.
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 7], packed[0, 8] = 0x50, 0x0B
    scales = u8(0x42, 0x38).reshape(1, 2).view(torch.float8_e4m3fn)
    values = dequantize_nvfp4(packed, scales, torch.tensor(factor), divide=divide)
    assert values[0, 15:17].tolist() == [0.9375, -0.1875]
    assert values.count_nonzero() == 2
