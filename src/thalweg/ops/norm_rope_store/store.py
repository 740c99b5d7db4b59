"""A latent row: RMS norm, rope, quantisation by the cache's layout, paged write. One launch.

Grid: a program a row, WIDTH channels spread over its threads; a row without a slot ends at once. Float64 up to the one
rounding to float32, as in the reference: the bytes of a cache are compared. That is about 2,000 operations a row, also where a
card does 2 a clock and multiprocessor. Nothing is in shared memory but sums and neighbours of pairs.
"""

import triton
import triton.language as tl

from thalweg.ops.device.rope import rms_norm, rope
from thalweg.ops.device.store import store_row


@triton.jit
def store_kernel(
    kv, norm, frequencies, positions, cache, slots,
    channels, normed, pairs, pool, page_slots, kv_row, page_stride, eps, eps_rest,
    LAYOUT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """kv [rows, channels] -> cache. eps + eps_rest is the norm's epsilon in float64; `pairs` turn, the row's last."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < pool):
        channel = tl.arange(0, WIDTH)
        values = tl.load(kv + row * kv_row + channel, mask=channel < channels, other=0.0).to(tl.float64)
        values = rms_norm(values, norm, normed, eps, eps_rest, WIDTH)
        values = rope(values, tl.load(positions + row), frequencies, channels // 2 - pairs, pairs, WIDTH)
        store_row(values.to(tl.float32), cache, slot, page_slots, page_stride, channels, LAYOUT, WIDTH)
