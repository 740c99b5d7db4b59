"""Rotation back by a position, of channel pairs (2i, 2i + 1) held in registers."""

import triton
import triton.language as tl


@triton.jit
def turns(position, inverse_frequencies, pair, there):
    """(cos, sin) float32 of position x inverse frequency of each `pair`; of no turn where not `there`.

    The angle is one float32 product, as `ops.rotary.rotate` forms it.
    """
    angle = position.to(tl.float32) * tl.load(inverse_frequencies + pair, mask=there, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def turned_back(values, cos, sin, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """float32 [ROWS, 2 x PAIRS], each pair turned by minus its angle; cos and sin [PAIRS]."""
    even, odd = tl.split(tl.reshape(values, [ROWS, PAIRS, 2]))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [ROWS, 2 * PAIRS])
