"""From the partial products to a block's input and the weights behind it: second of an operation's two launches.

Grid: programs of MIXERS rows each that find post and comb, then a program a row for the block's input (with HEAD only these). All
add up the splits' partial products themselves, in one order. post and comb: Sinkhorn on sixteen values a row, each a register
of the thread that owns the row. The input: the row's four streams, asked for before the sums, stay in registers (ONE) through
the weighted sum and its norm; rows wider than WIDTH are read twice.
"""

import triton
import triton.language as tl


@triton.jit
def _totals(partial, row, rows, splits, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [R, COLUMNS]: the products of rows `row` [R] and, in the last used column, their sums of squares."""
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([row.shape[0], COLUMNS], tl.float32)
    for begin in range(0, splits, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        at = (split.to(tl.int64)[:, None] * rows + row[None, :]) * COLUMNS
        there = (split < splits)[:, None] & (row < rows)[None, :]
        part = tl.load(partial + at[:, :, None] + column[None, None, :], mask=there[:, :, None], other=0.0)
        total += tl.sum(part, 0)
    return total


@triton.jit
def _column(total, NUMBER: tl.constexpr):
    chosen = tl.arange(0, total.shape[1]) == NUMBER
    return tl.sum(tl.where(chosen[None, :], total, 0.0), 1)


@triton.jit
def _logit(total, inverse, scale, base, PART: tl.constexpr, NUMBER: tl.constexpr):
    """[R]: scale x normalised product + base."""
    return _column(total, NUMBER) * inverse * tl.load(scale + PART) + tl.load(base + NUMBER)


@triton.jit
def _inverse_norm(total, width, norm_eps, OUTPUTS: tl.constexpr):
    return 1.0 / tl.sqrt(_column(total, OUTPUTS) / (4 * width) + norm_eps)


@triton.jit
def _over_rows(c, hc_eps):
    """Every element over the sum of its row and eps."""
    new: tl.tuple = ()
    for i in tl.static_range(4):
        inverse = 1.0 / ((c[4 * i] + c[4 * i + 1]) + (c[4 * i + 2] + c[4 * i + 3]) + hc_eps)
        for j in tl.static_range(4):
            new = new + (c[4 * i + j] * inverse,)
    return new


@triton.jit
def _over_columns(c, hc_eps):
    inverses: tl.tuple = ()
    for j in tl.static_range(4):
        inverses = inverses + (1.0 / ((c[j] + c[4 + j]) + (c[8 + j] + c[12 + j]) + hc_eps),)
    new: tl.tuple = ()
    for i in tl.static_range(4):
        for j in tl.static_range(4):
            new = new + (c[4 * i + j] * inverses[j],)
    return new


@triton.jit
def _softmax_rows(logits, hc_eps):
    new: tl.tuple = ()
    for i in tl.static_range(4):
        top = tl.maximum(logits[4 * i], logits[4 * i + 1])
        top = tl.maximum(top, tl.maximum(logits[4 * i + 2], logits[4 * i + 3]))
        weights: tl.tuple = ()
        total = tl.zeros_like(top)
        for j in tl.static_range(4):
            weight = tl.exp(logits[4 * i + j] - top)
            weights = weights + (weight,)
            total += weight
        for j in tl.static_range(4):
            new = new + (weights[j] / total + hc_eps,)
    return new


@triton.jit
def _mixing(partial, scale, base, post, comb, row, rows, width, splits, norm_eps, hc_eps, iterations,
            OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Writes post and comb of the rows `row` [R]."""
    total = _totals(partial, row, rows, splits, SPLITS, COLUMNS)
    inverse = _inverse_norm(total, width, norm_eps, OUTPUTS)
    inside = row < rows
    row = row.to(tl.int64)
    for i in tl.static_range(4):
        weight = 2.0 * tl.sigmoid(_logit(total, inverse, scale, base, 1, 4 + i))
        tl.store(post + row * 4 + i, weight, mask=inside)
    logits: tl.tuple = ()
    for ij in tl.static_range(16):
        logits = logits + (_logit(total, inverse, scale, base, 2, 8 + ij),)
    c = _over_columns(_softmax_rows(logits, hc_eps), hc_eps)
    for _ in range(1, iterations):
        c = _over_columns(_over_rows(c, hc_eps), hc_eps)
    for ij in tl.static_range(16):
        tl.store(comb + row * 16 + ij, c[ij], mask=inside)


@triton.jit
def _weighted(streams, stream, pre, begin, width, WIDTH: tl.constexpr):
    """float32 [WIDTH]: sum_i pre_i X_i of the channels from `begin` on."""
    channel = begin + tl.arange(0, WIDTH)
    u = tl.zeros([WIDTH], tl.float32)
    for i in tl.static_range(4):
        value = tl.load(streams + i * stream + channel, mask=channel < width, other=0.0)
        u += pre[i] * value.to(tl.float32)
    return u


@triton.jit
def _load(at, there):
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def finish_kernel(
    streams, partial, scale, base, norm, u, post, comb,
    rows, width, splits, iterations, mixing, stream_row, stream, norm_eps, hc_eps,
    HEAD: tl.constexpr, NORM: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, MIXERS: tl.constexpr, WIDTH: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """streams [rows, 4, width], partial float32 [splits, rows, COLUMNS] -> u [rows, width]; post and comb unless HEAD.

    `mixing`: programs for post and comb, ceil(rows / MIXERS), none with HEAD. NORM: u is normalised, times `norm` [width].
    """
    program = tl.program_id(0)
    if program < mixing:
        some = program * MIXERS + tl.arange(0, MIXERS)
        if not HEAD:
            _mixing(
                partial, scale, base, post, comb, some, rows, width, splits, norm_eps, hc_eps, iterations,
                OUTPUTS, COLUMNS, SPLITS,
            )  # fmt: skip
    else:
        row = program - mixing
        own = streams + row.to(tl.int64) * stream_row
        into = u + row.to(tl.int64) * width
        channel = tl.arange(0, WIDTH)
        values: tl.tuple = ()
        if ONE:
            for i in tl.static_range(4):
                values = values + (_load(own + i * stream + channel, channel < width),)
        total = _totals(partial, row + tl.arange(0, 1), rows, splits, SPLITS, COLUMNS)
        inverse = _inverse_norm(total, width, norm_eps, OUTPUTS)
        pre: tl.tuple = ()
        for i in tl.static_range(4):
            # A number, not a block of one: that would spread every row over every thread.
            pre = pre + (tl.sum(tl.sigmoid(_logit(total, inverse, scale, base, 0, i)), 0) + hc_eps,)
        if ONE:
            sums = tl.zeros([WIDTH], tl.float32)
            for i in tl.static_range(4):
                sums += pre[i] * values[i].to(tl.float32)
            if NORM:
                sums *= 1.0 / tl.sqrt(tl.sum(sums * sums, 0) / width + norm_eps)
                sums *= tl.load(norm + channel, mask=channel < width, other=0.0).to(tl.float32)
            tl.store(into + channel, sums.to(u.dtype.element_ty), mask=channel < width)
        else:
            factor = 1.0
            if NORM:
                squares = tl.zeros([WIDTH], tl.float32)
                for begin in range(0, width, WIDTH):
                    sums = _weighted(own, stream, pre, begin, width, WIDTH)
                    squares += sums * sums
                factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + norm_eps)
            for begin in range(0, width, WIDTH):
                sums = _weighted(own, stream, pre, begin, width, WIDTH) * factor
                if NORM:
                    sums *= tl.load(norm + begin + channel, mask=begin + channel < width, other=0.0).to(tl.float32)
                tl.store(into + begin + channel, sums.to(u.dtype.element_ty), mask=begin + channel < width)
