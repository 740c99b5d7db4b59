"""The interpreter of the tests computes what a GPU does, or refuses; compared with torch."""

import pytest
import torch
import triton
import triton.language as tl

from tests.interpreter import watching

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")

FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.float8e4nv}


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right))


@triton.jit
def convert(source, target, TO: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets).to(TO))


@triton.jit
def double(source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(source + offsets)
    tl.store(target + offsets, values + values)


@triton.jit
def keep_positive(source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(source + offsets)
    tl.store(target + offsets, tl.where(values.to(tl.float32) > 0, values, tl.zeros_like(values)))


@triton.jit
def sum_between(source, bounds, out):
    total = 0.0
    for index in range(tl.load(bounds), tl.load(bounds + 1)):
        total += tl.load(source + index)
    tl.store(out, total)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_are_those_of_the_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 32, generator=generator).to(dtype)
    b = torch.randn(32, 16, generator=generator).to(dtype)
    out = torch.full((16, 16), float("nan"))
    product[(1,)](a, b, out, 16, 16, 32)
    assert torch.allclose(out.double(), a.double() @ b.double(), rtol=0, atol=1e-5)


def every_rounding() -> torch.Tensor:
    """Float32 values between, on and beside the numbers of the narrow formats, with the carries and the subnormals."""
    magnitudes = torch.cat([torch.logspace(-12, 9, 2000, base=2.0), torch.tensor([0.0, 2.0**-10, 1.99999, 31.9])])
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([magnitudes, -magnitudes, midpoints, torch.tensor([float("nan")])])
    return torch.cat([values, values.new_zeros(8192 - values.numel())])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_conversions_from_float32_round_to_nearest_even_and_e4m3_saturates(dtype: torch.dtype) -> None:
    values = every_rounding()
    converted = torch.empty(values.shape, dtype=dtype)
    convert[(1,)](values, converted, FLOATS[dtype], values.numel())
    clamped = values.clamp(-448, 448) if dtype == torch.float8_e4m3fn else values
    expected = clamped.to(dtype).float()
    assert torch.equal(converted.float().nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_conversions_to_float32_are_exact_for_every_code(dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    codes = torch.arange(2**bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.uint16).view(dtype)
    values = torch.empty(codes.shape, dtype=torch.float32)
    convert[(1,)](codes, values, tl.float32, codes.numel())
    assert torch.equal(values.nan_to_num(nan=1e9), codes.float().nan_to_num(nan=1e9))


def test_integers_become_bfloat16_values() -> None:
    converted = torch.empty(4, dtype=torch.bfloat16)
    convert[(1,)](torch.tensor([0, 3, -7, 257], dtype=torch.int32), converted, tl.bfloat16, 4)
    assert converted.tolist() == [0, 3, -7, 256]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_arithmetic_that_the_interpreter_would_do_on_codes_is_refused(dtype: torch.dtype) -> None:
    values = torch.ones(4).to(dtype)
    with pytest.raises(Exception, match="convert to float32 first"):
        double[(1,)](values, torch.empty_like(values), 4)


def test_choosing_between_bfloat16_values_is_no_arithmetic() -> None:
    values = torch.tensor([1.5, -2.0, 0.25, -1.0], dtype=torch.bfloat16)
    kept = torch.empty_like(values)
    keep_positive[(1,)](values, kept, 4)
    assert kept.tolist() == [1.5, 0, 0.25, 0]


def test_a_loop_takes_its_bounds_from_memory() -> None:
    total = torch.empty(1)
    sum_between[(1,)](torch.arange(10.0), torch.tensor([2, 5], dtype=torch.int32), total)
    assert total.item() == 9


@triton.jit
def shift(source, target, count, by, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets + by, mask=offsets < count), mask=offsets < count)


def test_accesses_outside_of_tensors_and_second_stores_are_seen() -> None:
    values = torch.arange(12.0)
    source, target = values[:4], torch.zeros(4)
    with watching() as accesses:
        shift[(1,)](source, target, 4, 0, 8)
    assert accesses.outside(source, target) == 0 and accesses.stored_twice(target) == 0
    with watching() as accesses:
        shift[(2,)](source, target, 4, 3, 8)
    assert accesses.outside(source, target) == 2 * 3 and accesses.stored_twice(target) == 4
    with watching() as accesses:
        shift[(1,)](source, target, 4, 0, 8)
    assert accesses.outside(source) == 4
