"""A room of kernels for the tests of the compile suite: one that is as it should be, and one for everything that can be wrong."""

import os
from collections.abc import Iterator

import triton
import triton.language as tl

from thalweg.ops.device.e4m3 import e4m3_to_f16
from thalweg.ops.hardware import Hardware
from thalweg.ops.variants import KernelVariant


@triton.jit
def decode(codes, values, count, HOW: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(values + offsets, e4m3_to_f16(tl.load(codes + offsets, mask=inside, other=0), HOW), mask=inside)


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right, input_precision="ieee"))


@triton.jit
def divide_by_text(values):
    tl.store(values, tl.load(values) / "two")


class Crashing:
    """Takes its whole process down, as a failed assertion of LLVM does."""

    @property
    def arg_names(self) -> list[str]:
        os.abort()


def matrix(name: str, kind: str, m: int, n: int, k: int, **more: object) -> KernelVariant:
    return KernelVariant(
        name=name,
        kernel=product,
        signature={"a": kind, "b": kind, "out": "*fp32"},
        constexprs={"M": m, "N": n, "K": k},
        divisible_by_16=("a", "b", "out"),
        matrix=True,
        **more,
    )


def decoding(name: str, how: str, **more: object) -> KernelVariant:
    return KernelVariant(
        name=name,
        kernel=decode,
        signature={"codes": "*u8", "values": "*fp16", "count": "i32"},
        constexprs={"HOW": how, "BLOCK": 1024},
        divisible_by_16=("codes", "values"),
        **more,
    )


def variants(hardware: Hardware) -> Iterator[KernelVariant]:
    yield decoding("decode", hardware.e4m3_to_f16, representative=True)
    yield matrix("product/f16", "*fp16", 64, 64, 64, representative=True)
    if hardware.backend == "hip":
        yield decoding("foreign", "packed")  # PTX on a card that has none
        return
    if hardware.fp8_dot:
        yield matrix("product/fp8", "*fp8e4nv", 64, 64, 64)
    yield matrix("wide", "*fp16", 64, 64, 512)
    yield matrix("scalar", "*fp32", 16, 16, 16)
    yield KernelVariant("broken", divide_by_text, {"values": "*fp32"}, {})
    yield KernelVariant("incomplete", decode, {"codes": "*u8"}, {})
    if hardware.name == "sm_86":
        yield matrix("spilling", "*fp16", 128, 128, 16, num_warps=1)
        yield KernelVariant("crashing", Crashing(), {}, {})
