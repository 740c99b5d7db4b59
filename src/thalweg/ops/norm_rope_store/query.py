"""Queries: RMS norm and rope a head; of the indexer rope, Hadamard rotation and e4m3. One launch each.

Grid: (rows, tiles of HEADS heads). A program owns HEADS x WIDTH channels, in registers from the load to the store; cosines and
sines are found once for its heads. Float32 inside. Results are one rounding away: bf16 or float32, or e4m3 codes, by bits on
every architecture, whose scale goes into the head's weight.
"""

import triton
import triton.language as tl

from thalweg.ops.device.rope import cos_sin, hadamard, turn_pair
from thalweg.ops.device.store import plain_scale


@triton.jit
def _turned(values, position, frequencies, first, pairs, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """float32 [HEADS, WIDTH] with its pairs from `first` on turned."""
    cos, sin = cos_sin(position, frequencies, first, pairs, WIDTH // 2)
    even, odd = tl.split(tl.reshape(values, [HEADS, WIDTH // 2, 2]))
    cos, sin = tl.broadcast_to(cos[None, :], even.shape), tl.broadcast_to(sin[None, :], even.shape)
    even, odd = turn_pair(even, odd, cos, sin)
    return tl.reshape(tl.join(even, odd), [HEADS, WIDTH])


@triton.jit
def query_kernel(
    q, frequencies, positions, out, heads, channels, pairs, q_row, q_head, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """q [rows, heads, channels] -> out, contiguous: each head over its root mean square, then turned."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)
    there = (head < heads)[:, None] & (channel < channels)[None, :]
    at = q + row * q_row + head.to(tl.int64)[:, None] * q_head + channel[None, :]
    values = tl.load(at, mask=there, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 1) / channels + eps)
    values *= factor[:, None]
    values = _turned(values, tl.load(positions + row), frequencies, channels // 2 - pairs, pairs, HEADS, WIDTH)
    into = out + (row * heads + head)[:, None] * channels + channel[None, :]
    tl.store(into, values.to(out.dtype.element_ty), mask=there)


@triton.jit
def index_query_kernel(
    q, weights, frequencies, positions, out, folded, heads, channels, pairs, q_row, q_head, weights_row,
    HADAMARD: tl.constexpr, QUANTISE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """q [rows, heads, channels] -> out, uint8 e4m3 codes (QUANTISE) or float32, and weights [rows, heads] -> folded."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)
    there = (head < heads)[:, None] & (channel < channels)[None, :]
    at = q + row * q_row + head.to(tl.int64)[:, None] * q_head + channel[None, :]
    values = tl.load(at, mask=there, other=0.0).to(tl.float32)
    values = _turned(values, tl.load(positions + row), frequencies, channels // 2 - pairs, pairs, HEADS, WIDTH)
    if HADAMARD:
        values = hadamard(values, HEADS, WIDTH, LOG2)
    weight = tl.load(weights + row * weights_row + head, mask=head < heads, other=0.0)
    into = out + (row * heads + head)[:, None] * channels + channel[None, :]
    if QUANTISE:
        scale, codes = plain_scale(values)
        weight *= scale
        tl.store(into, codes, mask=there)
    else:
        tl.store(into, values, mask=there)
    tl.store(folded + row * heads + head, weight, mask=head < heads)
