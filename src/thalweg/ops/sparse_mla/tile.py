"""Cached rows as the matrix products take them: bf16 [BLOCK, channels], by chunks of channels. Only this file knows layouts.

v4: e4m3 times ue8m0, exact in bf16: 448 channels in four chunks; the 64 bf16 channels are a fifth.
v32: the e4m3 codes alone, exact in bf16: four chunks of 128. Their float32 scales meet scores and weights, in float32.
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
def load_groups(rows, page_at, page_slots, slot, valid):
    """int64 [BLOCK]: the eight bytes of scales of a v4 row; they follow the page's rows."""
    at = page_at + (page_slots * 576 + slot * 8)
    return tl.load(rows.to(tl.pointer_type(tl.int64)) + (at >> 3), mask=valid, other=0)


@triton.jit
def load_scale(rows, at, valid, CHUNK: tl.constexpr):
    """float32 [BLOCK]: the scale of a chunk of v32 rows."""
    return tl.load(rows.to(tl.pointer_type(tl.float32)) + ((at + 512) >> 2) + CHUNK, mask=valid, other=0.0)


@triton.jit
def load_chunk(rows, at, valid, scales, CODES: tl.constexpr, GROUP: tl.constexpr, START: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """bf16 [BLOCK, WIDTH]: channels from START on of the rows at `at` int64 [BLOCK]; zeros where not `valid`.

    CODES: "" for bf16 rows, or how e4m3 becomes float16. GROUP: channels of a ue8m0 scale, byte i of `scales` int64 [BLOCK]
    being that of group i; 0 leaves codes unscaled.
    """
    column = START + tl.arange(0, WIDTH)
    stored = tl.load(rows + at[:, None] + column[None, :], mask=valid[:, None], other=0)
    if CODES == "":
        return stored
    else:
        return _decode(stored, scales, CODES, GROUP, START, WIDTH)


@triton.jit
def _decode(codes, scales, CODES: tl.constexpr, GROUP: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    values = e4m3_to_f16(codes, CODES).to(tl.float32)
    if GROUP == 0:
        return values.to(tl.bfloat16)
    else:
        byte = START // GROUP + tl.arange(0, WIDTH // GROUP)
        scale = _ue8m0(((scales[:, None] >> (8 * byte)[None, :]) & 0xFF).to(tl.int32))
        values = tl.reshape(values, [values.shape[0], WIDTH // GROUP, GROUP]) * scale[:, :, None]
        return tl.reshape(values, [values.shape[0], WIDTH]).to(tl.bfloat16)


@triton.jit
def _ue8m0(codes):
    """float32 values of int32 `codes` 0 to 255, any shape: 2^(code - 127); 255 is NaN."""
    bits = tl.where(codes == 0, 1 << 22, codes << 23)  # code 0 is a subnormal
    return tl.where(codes == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
