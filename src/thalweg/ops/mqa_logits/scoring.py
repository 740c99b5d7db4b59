"""Indexer scores of one tile on tensor cores: the pieces that mqa_logits and index_topk share.

A tile: keys [BLOCK, D] (shared memory, several in flight) times the queries of up to ROWS rows of the request [D, ROWS x
heads] (shared memory, loaded once a row): float32 products in registers, where ReLU, head weights, the sum over heads and
the keys' scales follow. Keys are the rows of the product, so that the sum over heads crosses four lanes only.
"""

import triton
import triton.language as tl

from thalweg.ops.device.e4m3 import e4m3_to_f16


@triton.jit
def load_queries(q, weights, row, size, heads, q_row, q_head, DOT: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
                 WIDTH: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The queries [D, ROWS x HEADS] and head weights [ROWS x HEADS] of `size` rows from `row` on; zeros beyond them."""
    column = tl.arange(0, ROWS * HEADS)
    j = column // HEADS
    head = column % HEADS
    inside = (j < size) & (head < heads)
    d = tl.arange(0, D)
    at = (row + j).to(tl.int64) * q_row + head * q_head
    codes = tl.load(q + at[None, :] + d[:, None], mask=inside[None, :] & (d < WIDTH)[:, None], other=0.0)
    weight = tl.load(weights + (row + j).to(tl.int64) * heads + head, mask=inside, other=0.0)
    return as_operand(codes, DOT), weight


@triton.jit
def as_operand(codes, DOT: tl.constexpr):
    """e4m3 as the matrix product takes it: as it is (DOT "fp8"), or as float16, exactly (DOT says how: `e4m3_to_f16`)."""
    if DOT == "fp8":
        return codes
    else:
        return e4m3_to_f16(codes, DOT)


@triton.jit
def load_tile(keys, scales, pages, start, end, pool, page_stride, scale_stride, PAGE: tl.constexpr, WIDTH: tl.constexpr,
              D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(codes [BLOCK, D], scales [BLOCK], there [BLOCK]) of the entries of one request from `start` on, live below `end`.

    there: live, and the page is in the pool. PAGE 0: the keys lie side by side.
    """
    lane = tl.arange(0, BLOCK)
    entry = start + lane
    live = entry < end
    if PAGE == 0:
        there = live
        slot = entry.to(tl.int64)
        scale_at = slot
        key_at = slot * WIDTH
    elif PAGE % BLOCK == 0:  # the tile lies in one page
        page = tl.load(pages + start // PAGE).to(tl.int64)
        there = entry < tl.where((page >= 0) & (page < pool), end, 0)
        slot = start % PAGE + lane
        scale_at = page * scale_stride + slot
        key_at = page * page_stride + slot * WIDTH
    else:
        page = tl.load(pages + entry // PAGE, mask=live, other=-1).to(tl.int64)
        there = live & (page >= 0) & (page < pool)
        slot = entry % PAGE
        scale_at = page * scale_stride + slot
        key_at = page * page_stride + slot * WIDTH
    codes, scale = load_at(keys, scales, key_at, scale_at, there, WIDTH, D)
    return codes, scale, there


@triton.jit
def load_at(keys, scales, key_at, scale_at, there, WIDTH: tl.constexpr, D: tl.constexpr):
    """(codes [BLOCK, D], scales [BLOCK]) at offsets [BLOCK] of `keys` and `scales`; zeros where not `there`."""
    d = tl.arange(0, D)
    inside = there[:, None]
    if WIDTH < D:
        inside = inside & (d < WIDTH)[None, :]
    codes = tl.load(keys + key_at[:, None] + d[None, :], mask=inside, other=0.0)
    return codes, tl.load(scales + scale_at, mask=there, other=0.0)


@triton.jit
def score(codes, scale, there, queries, weight, DOT: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Scores float32 [BLOCK, ROWS] of a tile of keys; -inf where not `there`."""
    dots = tl.dot(as_operand(codes, DOT), queries, out_dtype=tl.float32)
    weighted = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    scores = tl.sum(tl.reshape(weighted, (BLOCK, ROWS, HEADS)), 2) * scale[:, None]
    return tl.where(there[:, None], scores, float("-inf"))
