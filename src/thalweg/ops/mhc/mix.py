"""The streams behind a block, and their product with the mixing weights: first of an operation's two launches.

Grid: (row tiles, splits of the channels). A program owns ROWS rows and an equal share of the channels, in all four streams. By
BLOCK channels it mixes the streams (POST), stores them, and multiplies them as stored by its slice of fn (MIX): fn is read once
a row tile, never by every multiprocessor. In registers: a block of one new stream, ROWS x COLUMNS partial products, the sums of
squares; the old streams are read for each new one, from the first-level cache. The partial results go out as one row of COLUMNS
floats; finish.py adds up the splits.
"""

import triton
import triton.language as tl


@triton.jit
def _coefficient(at, inside):
    return tl.load(at, mask=inside, other=0.0)[:, None]


@triton.jit
def _load(at, there):
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _thirds(values):
    """float32 as the sum of three bfloat16, exact but for its last bit or two."""
    high = values.to(tl.bfloat16)
    rest = values - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(stored, weights, sums):
    """sums + stored x weights; the smallest terms first, those below 2^-24 of the largest left out."""
    high, middle, low = _thirds(weights)
    if stored.dtype == tl.bfloat16:
        sums = tl.dot(stored, low, sums)
        sums = tl.dot(stored, middle, sums)
        return tl.dot(stored, high, sums)
    else:
        top, centre, bottom = _thirds(stored)
        sums = tl.dot(bottom, high, sums)
        sums = tl.dot(centre, middle, sums)
        sums = tl.dot(top, low, sums)
        sums = tl.dot(centre, high, sums)
        sums = tl.dot(top, middle, sums)
        return tl.dot(top, high, sums)


@triton.jit
def mix_kernel(
    streams, y, post, comb, fn, out, partial, rows, width, share, stream_row, stream, y_row, fn_row,
    POST: tl.constexpr, MIX: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """streams [rows, 4, width] (-> out, contiguous) -> partial float32 [splits, rows, COLUMNS].

    `share`: channels of a split, a multiple of BLOCK. Column OUTPUTS of `partial` is the sum of squares. y, post, comb and out
    are read only with POST, fn and partial only with MIX.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, width)
    row = row.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for begin in range(first, last, BLOCK):
        channel = begin + tl.arange(0, BLOCK)
        there = inside[:, None] & (channel < last)[None, :]
        at = streams + row[:, None] * stream_row + channel[None, :]
        for j in range(4):  # not unrolled: the compiler would keep the operands of all four products
            if POST:
                value = _load(y + row[:, None] * y_row + channel[None, :], there)
                value *= _coefficient(post + row * 4 + j, inside)
                for i in tl.static_range(4):
                    value += _load(at + i * stream, there) * _coefficient(comb + row * 16 + 4 * i + j, inside)
                stored = value.to(streams.dtype.element_ty)
                tl.store(out + row[:, None] * (4 * width) + (j * width + channel)[None, :], stored, mask=there)
            else:
                stored = tl.load(at + j * stream, mask=there, other=0.0)
            if MIX:  # of the streams as they are stored, not as they were computed
                value = stored.to(tl.float32)
                squares += tl.sum(value * value, 1)
                of = fn + column[None, :] * fn_row + (j * width + channel)[:, None]
                weights = tl.load(of, mask=(column < OUTPUTS)[None, :] & (channel < last)[:, None], other=0.0)
                sums = _product(stored, weights, sums)
    if MIX:
        result = tl.where((column == OUTPUTS)[None, :], squares[:, None], sums)
        at = partial + (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * COLUMNS + column[None, :]
        tl.store(at, result, mask=inside[:, None])
