"""e4m3 codes become the float16 values that torch's float8_e4m3fn has, by every way a GPU may use."""

import pytest
import torch
import triton
import triton.language as tl

from thalweg.ops import hardware
from thalweg.ops.device.e4m3 import e4m3_to_f16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = ["arithmetic"]
if hardware.of_device(DEVICE).fp8_conversion:
    WAYS.append("hardware")
if DEVICE.type == "cuda":  # the interpreter has no PTX: what it runs as "packed" is "arithmetic"
    WAYS.append("packed")
ALL_CODES = torch.arange(256, dtype=torch.uint8)


@triton.jit
def decode(codes, values, count, HOW: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(values + offsets, e4m3_to_f16(tl.load(codes + offsets, mask=inside, other=0), HOW), mask=inside)


def decoded(codes: torch.Tensor, how: str) -> torch.Tensor:
    """float16 values of `codes` by a kernel, on the CPU."""
    values = torch.full(codes.shape, float("inf"), dtype=torch.float16, device=DEVICE)
    block = triton.next_power_of_2(codes.numel())
    decode[(1,)](codes.to(DEVICE), values, codes.numel(), HOW=how, BLOCK=block, enable_fp_fusion=True)
    return values.cpu()


def check(how: str, codes: torch.Tensor) -> None:
    expected = codes.view(torch.float8_e4m3fn).to(torch.float16)
    values = decoded(codes, how)
    nan = expected.isnan()
    assert torch.equal(values.isnan(), nan)
    # As bits: -0 is not 0.
    assert torch.equal(values.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


@pytest.mark.parametrize("how", WAYS)
def test_all_256_codes_are_exact(how: str) -> None:
    check(how, ALL_CODES)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 97, 4096])
@pytest.mark.parametrize("how", WAYS)
def test_any_count_of_codes_in_any_place_is_exact_on_a_gpu(how: str, count: int) -> None:
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(count))
    check(how, ALL_CODES.repeat(16)[order[:count]])


def test_the_reference_itself_has_two_nans_negative_zero_and_subnormals() -> None:
    expected = ALL_CODES.view(torch.float8_e4m3fn).double()
    assert expected.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert expected[0x80] == 0 and expected[0x80].signbit() and expected[1] == 2.0**-9 and expected[0x7E] == 448


def test_a_way_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Exception, match="no such way"):
        decoded(ALL_CODES, "bits")
