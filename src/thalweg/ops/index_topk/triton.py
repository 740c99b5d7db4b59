"""Scores and selection in one launch, over the keys that are there.

Grid and tiles: as mqa_logits/triton.py. Scores of up to FRESH entries go to a program's own stretch of scratch (it stays in
L2), and what exceeds the bar is absorbed into the list of the segment (topk/select.py). A row that lies in one program is
selected there and then; otherwise by the program that finishes it last. Scratch: programs x 3 lists of CAPACITY entries for
each row of a run, so about programs x k, whatever the lengths and the table's width.
"""

import triton
import triton.language as tl

from thalweg.ops.device.rows import program_of, row_of, run_of, share_of
from thalweg.ops.mqa_logits.triton import load_queries, tile_scores
from thalweg.ops.topk.select import absorb, post_bound, segment_of, to_key


@triton.jit
def element(vector, j, SIZE: tl.constexpr):
    """vector[j]"""
    return tl.sum(tl.where(tl.arange(0, SIZE) == j, vector, 0), 0)


@triton.jit
def index_score_kernel(
    q, keys, scales, weights, lengths, pages, row_to_request,
    list_keys, list_indices, fresh, bounds, counts,
    rows, requests, heads, span, pool, k, q_row, q_head, page_stride, scale_stride, table_stride, calls,
    MAPPED: tl.constexpr, COUNTED: tl.constexpr, DOT: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    STAGES: tl.constexpr, FRESH: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """indices and slots [rows, k]."""
    program = tl.program_id(0)
    if COUNTED:
        if program == 0:
            tl.atomic_add(calls, 1)
    total, working, tile, end, row, row_begin = share_of(
        program, tl.num_programs(0), lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK, SCAN
    )
    j = tl.arange(0, ROWS)
    own = fresh + program.to(tl.int64) * (ROWS * FRESH)
    while tile < end:
        request, size, longest, tiles = run_of(
            row, lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK
        )
        first = tile - row_begin
        last = tl.minimum(tiles, end - row_begin)
        first_program = program_of(row_begin, total, working)
        owner, length = row_of(row + j, lengths, row_to_request, rows, requests, span, MAPPED)
        length = tl.where(j < size, length, 0)
        table = pages + request.to(tl.int64) * table_stride
        count = tl.zeros((ROWS,), tl.int32)
        bar = tl.zeros((ROWS,), tl.uint32)
        segments = segment_of(program, first_program, 0, ROWS)
        if longest > 0:
            queries, weight = load_queries(q, weights, row, size, heads, q_row, q_head, DOT, ROWS, HEADS, WIDTH, D)
            for begin in range(first, last, FRESH // BLOCK):
                stop = tl.minimum(begin + FRESH // BLOCK, last)
                for t in tl.range(begin, stop, num_stages=STAGES):
                    entry = t * BLOCK + tl.arange(0, BLOCK)
                    scores = tile_scores(keys, scales, table, entry, entry < longest, pool, page_stride, scale_stride, queries, weight,
                                         DOT, PAGE, ROWS, HEADS, WIDTH, D, BLOCK)  # fmt: skip
                    at = j[None, :] * FRESH + (entry - begin * BLOCK)[:, None]
                    tl.store(own + at, scores)
                tl.debug_barrier()
                for i in range(0, size):
                    place = tl.arange(0, FRESH)
                    entry = begin * BLOCK + place
                    live = (entry < element(length, i, ROWS)) & (entry < stop * BLOCK)
                    score = tl.load(own + i * FRESH + place, mask=live, other=0.0)
                    key = tl.where(live, to_key(score), 0)
                    at = (segments + i).to(tl.int64) * CAPACITY
                    new_count, new_bar = absorb(key, entry, list_keys + at, list_indices + at, element(count, i, ROWS),
                                                element(bar, i, ROWS).to(tl.uint32), k, FRESH, CAPACITY)  # fmt: skip
                    count = tl.where(j == i, new_count, count)
                    bar = tl.where(j == i, new_bar, bar)
                tl.debug_barrier()
        tl.debug_barrier()
        for i in range(0, size):
            at = (segments + i).to(tl.int64) * CAPACITY
            row_length = element(length, i, ROWS)
            scored = tl.maximum(tl.minimum(row_length, last * BLOCK) - first * BLOCK, 0)
            held = element(count, i, ROWS)
            post_bound(list_keys + at, held, bounds + segments + i, scored, row_length, k, CAPACITY)
            tl.store(counts + segments + i, held)
        tile = row_begin + last
        row_begin += tiles
        row += size
