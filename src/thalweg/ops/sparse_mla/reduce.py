"""Merges the splits of a row: out = sum_i 2^{lse_i} out_i / (sum_i 2^{lse_i} + 2^{sink}), i in order; turns it back if asked.

Grid: a program a row and head. It reads all log-sum-exps of the row's splits, then GROUP partial results [GROUP, 512] at a
time (registers); splits without weight are not read. Nothing is shared between programs: the same bits at any batch.
"""

import triton
import triton.language as tl

from thalweg.ops.device.rope import turned_back, turns


@triton.jit
def reduce_kernel(partial, partial_lse, sink, positions, frequencies, out, lse, heads, splits,
                  SINK: tl.constexpr, ROTATE: tl.constexpr, OVERLAP: tl.constexpr,
                  SPLITS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """partial float32 [rows, splits, heads, 512], partial_lse float32 [rows, splits, heads] in base 2 -> out, lse."""
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
    if OVERLAP:  # with the end of the splits, and the beginning of what follows
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    every = tl.arange(0, SPLITS)
    first = row * splits * heads + head  # of the row's log-sum-exps; the next split's is `heads` further
    each = tl.load(partial_lse + first + every * heads, mask=every < splits, other=float("-inf"))
    top = tl.max(each, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(each - safe), 0)
    column = tl.arange(0, 512)
    merged = tl.zeros([512], tl.float32)
    for begin in range(0, splits, GROUP):
        split = begin + tl.arange(0, GROUP)
        one = tl.load(partial_lse + first + split * heads, mask=split < splits, other=float("-inf"))
        weight = tl.exp2(one - safe)
        at = (first + split * heads) * 512
        part = tl.load(partial + at[:, None] + column[None, :], mask=(weight > 0)[:, None], other=0.0)
        merged += tl.sum(part * weight[:, None], 0)
    below = total
    if SINK:
        below += tl.exp2(tl.load(sink + head) * LOG2E - safe)
    merged = tl.where(total == 0, 0.0, merged / below)
    if ROTATE:  # the last 32 pairs; a turn of nothing changes no bit of the others
        pair = tl.arange(0, 256) - 224
        cos, sin = turns(tl.load(positions + row), frequencies, pair, pair >= 0)
        merged = tl.reshape(turned_back(tl.reshape(merged, [1, 512]), cos, sin, 1, 256), [512])
    at = row * heads + head
    tl.store(out + at * 512 + column, merged.to(out.dtype.element_ty))
    tl.store(lse + at, (top + tl.log2(total)) * LN2)


@triton.jit
def rotate_kernel(out, positions, frequencies, heads):
    """out bf16 [rows, heads, 512], in place: the last 64 channels of a row and head, for kernels that do not turn them back."""
    row = tl.program_id(0).to(tl.int64)
    cos, sin = turns(tl.load(positions + row), frequencies, tl.arange(0, 32), tl.arange(0, 32) >= 0)
    at = out + (row * heads + tl.program_id(1)) * 512 + 448 + tl.arange(0, 64)[None, :]
    tl.store(at, turned_back(tl.load(at).to(tl.float32), cos, sin, 1, 32).to(out.dtype.element_ty))
