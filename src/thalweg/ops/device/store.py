"""One row, quantised by its cache's layout and written to its slot: the bytes that `thalweg.layouts` writes.

The row is float32 [WIDTH], padded to a power of two, spread over the program; a slot's bytes go out in one store a kind. Amax
and scales are found on the bits: NaN is the largest magnitude there, as it must be, and no rounding of a division decides on
a power of two. Only the sign of a NaN may differ from what the layouts write.
"""

import torch
import triton
import triton.language as tl

from thalweg.layouts import exact, index_fp8, mla_bf16, v4, v32
from thalweg.layouts.registry import layout_of
from thalweg.ops.device.e4m3 import f32_to_e4m3

POINTERS = {v4.NAME: "*u8", v32.NAME: "*u8", index_fp8.NAME: "*u8", mla_bf16.NAME: "*bf16", exact.NAME: "*fp32"}
WIDTHS = {v4.NAME: 512, v32.NAME: 1024, index_fp8.NAME: 128, mla_bf16.NAME: 1024}  # padded; exact: any
EXACT_WIDTHS = (128, 512, 1024)  # of exact rows, what variants are compiled for; wider ones up to MOST
MOST = 4096


def width_of(layout: str, channels: int) -> int:
    """The padded width of a layout's rows."""
    return WIDTHS.get(layout) or max(EXACT_WIDTHS[0], triton.next_power_of_2(channels))


def elements(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels take it: elements of its first block, with the tensor's own page stride."""
    return layout_of(cache).blocks(cache)[0]


def rejects_cache(cache: torch.Tensor) -> str | None:
    """Why such a cache is not for the kernels that store, or None."""
    layout = layout_of(cache)
    if cache.shape[-1] % 2 and layout is exact:
        return f"rows of {cache.shape[-1]} channels, they turn pairs of even and odd ones"
    if layout is exact and cache.shape[-1] > MOST:
        return f"rows of {cache.shape[-1]} channels, they hold up to {MOST}"
    unit = {v4: 2, v32: 4, index_fp8: 4}.get(layout, 1)  # bytes of what is written at once
    if cache.stride(0) % unit or cache.storage_offset() % unit:
        return f"pages {cache.stride(0)} bytes apart at byte {cache.storage_offset()}: values of {unit} bytes are not aligned"
    return None


@triton.jit
def store_row(row, cache, slot, page_slots, page_stride, channels, LAYOUT: tl.constexpr, WIDTH: tl.constexpr):
    """Writes float32 `row` [WIDTH], `channels` of them real, to `slot` (inside the pool) of `cache`.

    `cache`: pointer to uint8 (v4, v32, index_fp8), bf16 (mla_bf16) or float32 (exact); page_stride in its elements.
    """
    page = slot // page_slots
    slot = (slot - page * page_slots).to(tl.int64)
    base = cache + page.to(tl.int64) * page_stride
    channel = tl.arange(0, WIDTH)
    if LAYOUT == "exact":
        tl.store(base + slot * channels + channel, row, mask=channel < channels)
    elif LAYOUT == "mla_bf16":
        tl.store(base + slot * 576 + channel, row.to(tl.bfloat16), mask=channel < 576)
    elif LAYOUT == "v4":
        _store_v4(row, base, slot, page_slots, channel)
    elif LAYOUT == "v32":
        scale, codes = _by_group(row, 128, WIDTH)
        at = base + slot * 656
        group = tl.arange(0, WIDTH // 128)
        tl.store(at + channel, codes, mask=channel < 512)
        tl.store((at + 512).to(tl.pointer_type(tl.float32)) + group, scale, mask=group < 4)
        rope = (at + 528).to(tl.pointer_type(tl.bfloat16)) + (channel - 512)
        tl.store(rope, row.to(tl.bfloat16), mask=(channel >= 512) & (channel < 576))
    else:
        tl.static_assert(LAYOUT == "index_fp8" and WIDTH == 128, "no such layout")
        scale, codes = _by_group(row, 128, WIDTH)
        tl.store(base + slot * 128 + channel, codes)
        scales = (base + page_slots * 128 + slot * 4).to(tl.pointer_type(tl.float32))
        tl.store(scales + tl.arange(0, 1), scale)


@triton.jit
def amax_bits(groups):
    """int32: the bits of max(|values|, 1e-4) over the last dimension of float32 `groups` [n, size]; NaN is above all."""
    magnitude = groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(tl.max(magnitude, 1), 0x38D1B717)


@triton.jit
def plain_scale(groups):
    """(float32 scales [n] = max(amax, 1e-4) / 448, uint8 codes [n, size]) of float32 `groups` [n, size]."""
    scale = amax_bits(groups).to(tl.float32, bitcast=True)
    scale = tl.div_rn(scale, tl.full(scale.shape, 448.0, tl.float32))
    return scale, f32_to_e4m3(tl.div_rn(groups, tl.broadcast_to(scale[:, None], groups.shape)))


@triton.jit
def _by_group(row, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    scale, codes = plain_scale(tl.reshape(row, [WIDTH // SIZE, SIZE]))
    return scale, tl.reshape(codes, [WIDTH])


@triton.jit
def _store_v4(row, base, slot, page_slots, channel):
    """Codes of 448 channels with seven ue8m0 scales and a byte of zero, 64 channels as bf16."""
    groups = tl.reshape(row, [8, 64])
    bits = amax_bits(groups)
    # amax / 448 rounded up to a power of two: 448 is 1.75 x 2^8, so mantissas up to 1.75 are in its own binade.
    code = tl.where(bits >= 0x7F800000, 255, ((bits + 0x1FFFFF) >> 23) - 8)
    inverse = tl.where(code == 255, 0x7FC00000, (254 - code) << 23).to(tl.float32, bitcast=True)
    codes = tl.reshape(f32_to_e4m3(groups * inverse[:, None]), [512])
    at = base + slot * 576
    group = tl.arange(0, 8)
    tl.store(at + channel, codes, mask=channel < 448)
    rope = (at + 448).to(tl.pointer_type(tl.bfloat16)) + (channel - 448)
    tl.store(rope, row.to(tl.bfloat16), mask=channel >= 448)
    tl.store(base + page_slots * 576 + slot * 8 + group, tl.where(group < 7, code, 0).to(tl.uint8))
