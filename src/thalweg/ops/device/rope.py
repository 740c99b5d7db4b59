"""RMS norm, rotary position and Hadamard rotation of rows held in registers, float32 or float64: what stores and queries share.

Channels are the last dimension, padded to a power of two with zeros. The angle, its cosine and sine are float32, as in the
references.
"""

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


@triton.jit
def rms_norm(row, weight, normed, eps, eps_rest, WIDTH: tl.constexpr):
    """`row` [WIDTH]: the first `normed` channels over their root mean square, times weight [normed]; the others as they were.

    eps + eps_rest: an epsilon of float64 as two float32.
    """
    channel = tl.arange(0, WIDTH)
    inside = channel < normed
    squares = tl.sum(tl.where(inside, row * row, 0.0), 0)
    factor = 1.0 / tl.sqrt(squares / normed + eps + eps_rest)
    weights = tl.load(weight + channel, mask=inside, other=0.0).to(row.dtype)
    return tl.where(inside, row * factor * weights, row)


@triton.jit
def cos_sin(position, frequencies, first, pairs, HALF: tl.constexpr):
    """float32 [HALF] cosines and sines: pair `first` + i turns by position x frequencies[i], i < pairs, others not at all."""
    pair = tl.arange(0, HALF) - first
    turned = (pair >= 0) & (pair < pairs)
    angle = position.to(tl.float32) * tl.load(frequencies + pair, mask=turned, other=0.0)
    return tl.where(turned, tl.cos(angle), 1.0), tl.where(turned, tl.sin(angle), 0.0)


@triton.jit
def turn_pair(even, odd, cos, sin):
    """A pair of channels turned; where sin is 0 and cos 1 it is left alone, whatever it holds."""
    still = (cos == 1.0) & (sin == 0.0)
    turned_even = tl.where(still, even, even * cos - odd * sin)
    return turned_even, tl.where(still, odd, even * sin + odd * cos)


@triton.jit
def rope(row, position, frequencies, first, pairs, WIDTH: tl.constexpr):
    """`row` [WIDTH] with its pairs (2i, 2i + 1) from pair `first` on turned by `position`."""
    cos, sin = cos_sin(position, frequencies, first, pairs, WIDTH // 2)
    even, odd = tl.split(tl.reshape(row, [WIDTH // 2, 2]))
    even, odd = turn_pair(even, odd, cos.to(row.dtype), sin.to(row.dtype))
    return tl.reshape(tl.join(even, odd), [WIDTH])


@triton.jit
def hadamard(rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr):
    """The orthonormal Sylvester-Hadamard rotation of `rows` [ROWS, WIDTH = 2^LOG2].

    Each step adds and subtracts neighbours and moves the lowest bit of a channel's number to the top: after LOG2 steps the
    channels are in their places again.
    """
    for _ in tl.static_range(LOG2):
        a, b = tl.split(tl.reshape(rows, [ROWS, WIDTH // 2, 2]))
        rows = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [ROWS, WIDTH])
    factor: tl.constexpr = 2.0 ** (-LOG2 / 2)
    return rows * factor
