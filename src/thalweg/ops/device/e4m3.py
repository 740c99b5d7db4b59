"""e4m3 codes to float16, exact for all 256: by the hardware, or by moving bits where it has no e4m3.

e4m3 is s eeee mmm with bias 7, float16 is s eeeee mmmmmmmmmm with bias 15. The seven low bits of a code, moved to bits 13..7
of a float16, have its value times 2^-8, subnormals included; a product with 2^8 mends that. The code of NaN (all seven
bits set) would become 480: adding 1 to the seven bits carries into an eighth bit for NaN alone, and that bit, moved along,
makes the exponent 31, which is NaN.
"""

import triton
import triton.language as tl


@triton.jit
def e4m3_to_f16(codes, HOW: tl.constexpr):
    """float16 values of uint8 e4m3 `codes`, any shape. HOW: `Hardware.e4m3_to_f16` ("hardware", "packed" or "arithmetic")."""
    tl.static_assert(HOW == "hardware" or HOW == "packed" or HOW == "arithmetic", "no such way to decode e4m3")
    if HOW == "hardware":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif HOW == "packed":
        return _packed(codes)
    else:
        return _arithmetic(codes)


@triton.jit
def _arithmetic(codes):
    """One code at a time, in plain Triton: runs everywhere. Eight to ten instructions a code."""
    codes = codes.to(tl.uint16)
    magnitude = codes & 0x7F
    magnitude |= (magnitude + 1) & 0x80
    bits = (magnitude << 7) | ((codes & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _packed_ptx(codes):
    """The same on two codes in one register: 3.6 instructions a code."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 pair, magnitude, carry, two8;
        mov.b32 two8, 0x5c005c00;                              // 256, 256
        prmt.b32 pair, $2, 0, 0x1404;                          // codes 0 and 1 in the high bytes of the halves
        and.b32 magnitude, pair, 0x7f007f00;
        add.u32 carry, magnitude, 0x01000100;
        lop3.b32 magnitude, magnitude, carry, 0x80008000, 0xf8;  // a or (b and c)
        shr.u32 magnitude, magnitude, 1;
        lop3.b32 magnitude, magnitude, pair, 0x80008000, 0xf8;
        mul.rn.f16x2 $0, magnitude, two8;
        prmt.b32 pair, $2, 0, 0x3424;                          // codes 2 and 3
        and.b32 magnitude, pair, 0x7f007f00;
        add.u32 carry, magnitude, 0x01000100;
        lop3.b32 magnitude, magnitude, carry, 0x80008000, 0xf8;
        shr.u32 magnitude, magnitude, 1;
        lop3.b32 magnitude, magnitude, pair, 0x80008000, 0xf8;
        mul.rn.f16x2 $1, magnitude, two8;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


# The interpreter runs no PTX.
_packed = _arithmetic if triton.knobs.runtime.interpret else _packed_ptx


@triton.jit
def f32_to_e4m3(values):
    """uint8 e4m3 codes of float32 `values`, any shape: to nearest, ties to even, saturating at +-448; NaN stays NaN.

    By bits, on every architecture: sm_80 and sm_86 have no instruction, and Triton's conversion for those that have one
    goes through float16 up to 3.8, which rounds twice. From 2^-6 on a code is the float's upper bits, rounded, with another
    bias; below, adding 2^14 leaves multiples of 2^-9, rounded by the adder.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = magnitude.to(tl.float32, bitcast=True) + 16384.0
    code = tl.where(magnitude < 0x3C800000, small.to(tl.int32, bitcast=True) - 0x46800000, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, tl.minimum(code, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
