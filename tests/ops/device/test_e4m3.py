"""e4m3 codes become the float16 values that torch's float8_e4m3fn has, by every way a GPU may use."""

import pytest
import torch
import triton
import triton.language as tl

from thalweg.layouts.e4m3 import to_e4m3
from thalweg.ops import hardware
from thalweg.ops.device.e4m3 import e4m3_to_f16, f32_to_e4m3

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


@triton.jit
def encode(values, codes, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + offsets, f32_to_e4m3(tl.load(values + offsets)))


def encoded(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes of float32 `values` [n x 65,536] by a kernel, on the CPU."""
    codes = torch.full(values.shape, 0x55, dtype=torch.uint8, device=DEVICE)
    encode[(values.numel() // 65_536,)](values.to(DEVICE), codes, BLOCK=65_536, num_warps=32, enable_fp_fusion=True)
    return codes.cpu()


def check_encoded(values: torch.Tensor) -> None:
    got, want = encoded(values), to_e4m3(values).view(torch.uint8)
    nan = values.isnan()
    assert torch.equal(got[~nan], want[~nan])
    assert ((got[nan] & 0x7F) == 0x7F).all()


def test_every_float32_to_its_upper_bits_becomes_the_nearest_code() -> None:
    """Signs, exponents and 7 bits of mantissa, 3 of them below a code's last: every tie, subnormals, infinity, NaN."""
    upper = torch.arange(65_536).to(torch.int32) << 16
    check_encoded(upper.view(torch.float32))


def test_a_hair_beside_a_tie_goes_to_its_own_side() -> None:
    """What a detour over float16 gets wrong: a value just above or below the middle of two codes."""
    upper = torch.arange(65_536).to(torch.int32) << 16
    for beside in (upper + 1, upper - 1, upper + 0x7FFF):
        check_encoded(beside.view(torch.float32))
    g = torch.Generator().manual_seed(1)
    check_encoded((torch.randint(-(2**31), 2**31, (4 * 65_536,), generator=g)).to(torch.int32).view(torch.float32))
    detour = (1.0625 + 2.0**-20,)  # 1.0625 is the middle of 1 and 1.125
    got = encoded(torch.full((65_536,), detour[0]))
    assert got[0] == 0x39 and torch.tensor(detour).half().to(torch.float8_e4m3fn).view(torch.uint8)[0] == 0x38
