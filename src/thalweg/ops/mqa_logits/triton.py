"""Indexer scores on tensor cores: a persistent grid over the tiles of real keys.

Grid: as many programs as stay resident; each takes an equal stretch of tiles of BLOCK keys, in order (ops/device/rows.py).
A tile: keys [BLOCK, D] (shared memory, several in flight) times the queries of up to ROWS rows of the request [D, ROWS x
heads] (shared memory, loaded once a row): float32 products in registers, where ReLU, head weights, the sum over heads and
the keys' scales follow. Keys are the rows of the product, so that the sum over heads crosses four lanes only.
"""

import triton
import triton.language as tl

from thalweg.ops.device.rows import row_of, run_of, share_of


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
    """e4m3 as the matrix product takes it: as it is (DOT "fp8"), or exactly as float16 ("f16")."""
    if DOT == "f16":
        return codes.to(tl.float16)
    return codes


@triton.jit
def tile_scores(keys, scales, pages, entry, live, pool, page_stride, scale_stride, queries, weight, DOT: tl.constexpr, PAGE: tl.constexpr,
                ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Scores float32 [BLOCK, ROWS] of the entries of one request; -inf where the page is in no pool. PAGE 0: no pages."""
    if PAGE == 0:
        page = entry * 0
        slot = entry
    else:
        page = tl.load(pages + entry // PAGE, mask=live, other=-1)
        slot = entry % PAGE
    there = live & (page >= 0) & (page < pool)
    d = tl.arange(0, D)
    at = page.to(tl.int64) * page_stride + slot.to(tl.int64) * WIDTH
    inside = there[:, None]
    if WIDTH < D:
        inside = inside & (d < WIDTH)[None, :]
    codes = tl.load(keys + at[:, None] + d[None, :], mask=inside, other=0.0)
    scale = tl.load(scales + page.to(tl.int64) * scale_stride + slot, mask=there, other=0.0)
    dots = tl.dot(as_operand(codes, DOT), queries, out_dtype=tl.float32)
    weighted = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    scores = tl.sum(tl.reshape(weighted, (BLOCK, ROWS, HEADS)), 2) * scale[:, None]
    return tl.where(there[:, None], scores, float("-inf"))


@triton.jit
def paged_logits_kernel(
    q, keys, scales, weights, lengths, pages, row_to_request, out,
    rows, requests, heads, span, pool, q_row, q_head, page_stride, scale_stride, table_stride, out_stride, calls,
    MAPPED: tl.constexpr, COUNTED: tl.constexpr, DOT: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out[row, :length] for every row."""
    program = tl.program_id(0)
    if COUNTED:
        if program == 0:
            tl.atomic_add(calls, 1)
    total, working, tile, end, row, row_begin = share_of(
        program, tl.num_programs(0), lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK, SCAN
    )
    while tile < end:
        request, size, longest, tiles = run_of(
            row, lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK
        )
        first = tile - row_begin
        last = tl.minimum(tiles, end - row_begin)
        if longest > 0:
            queries, weight = load_queries(q, weights, row, size, heads, q_row, q_head, DOT, ROWS, HEADS, WIDTH, D)
            j = tl.arange(0, ROWS)
            owner, length = row_of(row + j, lengths, row_to_request, rows, requests, span, MAPPED)
            length = tl.where(j < size, length, 0)
            table = pages + request.to(tl.int64) * table_stride
            for t in tl.range(first, last, num_stages=STAGES):
                entry = t * BLOCK + tl.arange(0, BLOCK)
                scores = tile_scores(keys, scales, table, entry, entry < longest, pool, page_stride, scale_stride, queries, weight,
                                     DOT, PAGE, ROWS, HEADS, WIDTH, D, BLOCK)  # fmt: skip
                at = (row + j).to(tl.int64)[None, :] * out_stride + entry[:, None]
                tl.store(out + at, scores, mask=entry[:, None] < length[None, :])
        tile = row_begin + last
        row_begin += tiles
        row += size
