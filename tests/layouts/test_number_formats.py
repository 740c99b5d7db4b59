"""e4m3 and ue8m0 agree with their definitions, code for code."""

import math

import numpy as np
import pytest
import torch

from tests.layouts.number_formats import E4M3, e4m3_codes
from thalweg.layouts.e4m3 import amax_scale, to_e4m3, ue8m0_ceil, ue8m0_value


def test_every_e4m3_code_decodes_to_its_definition() -> None:
    decoded = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(decoded, E4M3)
    assert np.isnan(E4M3).nonzero()[0].tolist() == [0x7F, 0xFF]


def test_every_finite_e4m3_value_encodes_to_its_own_code() -> None:
    codes = to_e4m3(torch.from_numpy(E4M3.astype(np.float32))).view(torch.uint8)
    finite = ~np.isnan(E4M3)
    assert codes.numpy()[finite].tolist() == np.arange(256)[finite].tolist()


def test_ties_round_to_even_codes_and_large_values_saturate() -> None:
    # Between 1 (0x38) and 1.125 (0x39): 1.0625 -> 0x38. Between 1.125 and 1.25 (0x3A): 1.1875 -> 0x3A.
    # Between 0 and 2^-9 (0x01): 2^-10 -> 0. Between 2^-9 and 2^-8 (0x02): 3 x 2^-10 -> 0x02.
    values = torch.tensor([1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 448.0, 449.0, 1e30, -1e30, math.inf])
    assert to_e4m3(values).view(torch.uint8).tolist() == [0x38, 0x3A, 0, 2, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E]
    assert math.isnan(to_e4m3(torch.tensor([math.nan])).float().item())


def test_rounding_agrees_with_a_search_over_the_values() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(20_000, generator=generator) * torch.logspace(-4, 3, 20_000)
    np.testing.assert_array_equal(to_e4m3(values).view(torch.uint8).numpy(), e4m3_codes(values.numpy()))


@pytest.mark.parametrize("exponent", [-126, -22, -1, 0, 1, 100, 126])
def test_a_scale_rounds_up_to_a_power_of_two_and_an_exact_power_stays(exponent: int) -> None:
    power = np.float32(2.0**exponent)
    scales = [np.nextafter(power, np.float32(0)), power, np.nextafter(power, np.float32(np.inf))]
    codes = ue8m0_ceil(torch.tensor(np.array(scales[exponent == -126 :])))  # below 2^-126 float32 is not normal
    assert codes.tolist() == [127 + exponent, 127 + exponent, 128 + exponent][exponent == -126 :]


def test_ue8m0_codes_are_powers_of_two_and_255_is_nan() -> None:
    values = ue8m0_value(torch.arange(256, dtype=torch.uint8)).double()
    assert values[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert math.isnan(values[255].item())


def test_a_nan_scale_encodes_to_the_nan_code() -> None:
    scales = torch.tensor([math.nan, math.inf])
    assert ue8m0_ceil(scales).tolist() == [255, 255]


def test_the_amax_is_floored_and_the_scale_is_not() -> None:
    # 1e-4 / 448 in float32 is 0x346FACAD, the same for a row of zeros and one of 1e-5.
    rows = torch.tensor([[0.0, 0.0], [1e-5, -1e-5], [1e-4, 0.0], [-1.0, 0.5]])
    bits = amax_scale(rows).view(torch.int32).tolist()
    assert bits == [0x346FACAD, 0x346FACAD, 0x346FACAD, 0x3B124925]  # 1/448 = 0x3B124925
