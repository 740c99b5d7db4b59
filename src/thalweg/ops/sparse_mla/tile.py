"""Cached rows as the matrix products take them: bf16 [BLOCK, channels], by chunks of channels. Only this file knows layouts.

v4: e4m3 times ue8m0, exact in bf16: 448 channels in four chunks; the 64 bf16 channels are a fifth.
v32: e4m3 times the powers of two of its float32 scales, exact in bf16, in four chunks of 128; what is left of the scales, in
[1, 2), meets scores and weights, in float32.
mla_bf16: as stored, two chunks of 256. The last 64 channels of v32 and mla_bf16 are in scores only, not in values.
"""

from types import ModuleType

import torch
import triton
import triton.language as tl

from thalweg.layouts import mla_bf16, sizes, v4, v32
from thalweg.layouts.registry import layout_of
from thalweg.ops.device.e4m3 import e4m3_to_f16

LAYOUTS = (v4.NAME, v32.NAME, mla_bf16.NAME)
CHUNKS = {v4.NAME: (128, 128, 128, 64), v32.NAME: (128, 128, 128, 128), mla_bf16.NAME: (256, 256)}
_SLOT = {v4.NAME: sizes.V4_DATA_BYTES, v32.NAME: sizes.V32_SLOT_BYTES, mla_bf16.NAME: sizes.MLA_DIM}


def rows(cache: torch.Tensor) -> torch.Tensor:
    """The cached rows as the kernels take them: a view [pages, slots, elements] of the first block of each page."""
    return layout_of(cache).blocks(cache)[0]


def pointer(layout: str) -> str:
    """Triton's type of a pointer to it."""
    return "*bf16" if layout == mla_bf16.NAME else "*u8"


def rejects_cache(name: str, cache: torch.Tensor) -> str | None:
    """Why such a cache is not for the kernels, or None."""
    layout: ModuleType = layout_of(cache)
    if layout.NAME not in LAYOUTS:
        return f"{name}: an {layout.NAME} cache, they read {', '.join(LAYOUTS)}"
    if cache.shape[0] * cache.shape[1] >= 2**31:
        return f"{name}: {cache.shape[0] * cache.shape[1]:,} slots, they count to 2^31"
    unit = {v4: 8, v32: 4}.get(layout, 1)  # bytes of the scales that are loaded at once
    if cache.stride(0) % unit or cache.storage_offset() % unit:
        return (
            f"{name}: pages {cache.stride(0)} bytes apart at byte {cache.storage_offset()}: the scales are not aligned"
        )
    return None


def constexprs(layout: str, e4m3_to_f16: str) -> dict[str, object]:
    """What the kernels take of a layout; `e4m3_to_f16` as `Hardware` has it."""
    chunks = CHUNKS[layout]
    return {
        "LAYOUT": layout,
        "CODES": "" if layout == mla_bf16.NAME else e4m3_to_f16,
        "CHUNKS": chunks,
        "STARTS": tuple(sum(chunks[:chunk]) for chunk in range(len(chunks))),
        "SLOT": _SLOT[layout],
    }


@triton.jit
def load_rope(rows, at, valid, LAYOUT: tl.constexpr):
    """bf16 [BLOCK, 64]: the rope channels of the rows at `at` int64 [BLOCK]; zeros where not `valid`."""
    channel = tl.arange(0, 64)[None, :]
    if LAYOUT == "v4":
        values = rows.to(tl.pointer_type(tl.bfloat16)) + ((at + 448) >> 1)[:, None]
    elif LAYOUT == "v32":
        values = rows.to(tl.pointer_type(tl.bfloat16)) + ((at + 528) >> 1)[:, None]
    else:
        values = rows + (at + 512)[:, None]
    return tl.load(values + channel, mask=valid[:, None], other=0.0)


@triton.jit
def load_bf16(rows, at, valid, START: tl.constexpr, WIDTH: tl.constexpr):
    """bf16 [BLOCK, WIDTH]: channels from START on of mla_bf16 rows."""
    column = START + tl.arange(0, WIDTH)
    return tl.load(rows + at[:, None] + column[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def load_scale_bytes(rows, page_at, page_slots, slot, valid):
    """int64 [BLOCK]: the eight bytes of scales of v4 rows; they follow the page's rows."""
    at = page_at + (page_slots * 576 + slot * 8)
    return tl.load(rows.to(tl.pointer_type(tl.int64)) + (at >> 3), mask=valid, other=0)


@triton.jit
def load_v4(rows, at, scale_bytes, valid, CODES: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """bf16 [BLOCK, WIDTH], exactly: channels from START on of v4 rows; byte i of `scale_bytes` is the scale of group i of 64."""
    group = START // 64 + tl.arange(0, WIDTH // 64)
    code = ((scale_bytes[:, None] >> (8 * group)[None, :]) & 0xFF).to(tl.int32)
    bits = tl.where(code == 0, 1 << 22, code << 23)  # code 0 is a subnormal, 255 NaN
    scale = tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return _decode(rows, at, scale, valid, CODES, START, WIDTH, 64)


@triton.jit
def load_v32(rows, at, valid, CODES: tl.constexpr, CHUNK: tl.constexpr):
    """bf16 [BLOCK, 128], exactly: codes of a chunk of v32 rows times the powers of two of their scales."""
    bits = tl.load(rows.to(tl.pointer_type(tl.int32)) + ((at + 512) >> 2) + CHUNK, mask=valid, other=0)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return _decode(rows, at, power[:, None], valid, CODES, 128 * CHUNK, 128, 128)


@triton.jit
def load_rest(rows, at, valid, CHUNK: tl.constexpr):
    """float32 [BLOCK]: what the powers of two leave of the scales of a chunk of v32 rows, in [1, 2)."""
    scale = tl.load(rows.to(tl.pointer_type(tl.float32)) + ((at + 512) >> 2) + CHUNK, mask=valid, other=0.0)
    bits = (scale.to(tl.int32, bitcast=True) & 0x007FFFFF) | 0x3F800000
    return tl.where((scale > 0) & (scale < float("inf")), bits.to(tl.float32, bitcast=True), scale)


@triton.jit
def _decode(rows, at, scale, valid, CODES: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """bf16 [BLOCK, WIDTH] of e4m3 codes, times scale float32 [BLOCK, WIDTH / GROUP]."""
    column = START + tl.arange(0, WIDTH)
    codes = tl.load(rows + at[:, None] + column[None, :], mask=valid[:, None], other=0)
    values = e4m3_to_f16(codes, CODES).to(tl.float32)
    values = tl.reshape(values, [codes.shape[0], WIDTH // GROUP, GROUP]) * scale[:, :, None]
    return tl.reshape(values, [codes.shape[0], WIDTH]).to(tl.bfloat16)
