"""Attention over index lists in Triton: lists divided into splits, each an online softmax over tiles of cached rows.

Grid: (rows x head tiles, splits). A program owns HEADS heads of one row (padded to the tile) and an equal share of the tiles
of BLOCK entries that the row's lists really have, the second cache's after the first's. In registers: HEADS x 512 float32
sums. In shared memory: the queries, the cached rows as stored (a tile ahead), and decoded to bf16, once for both products.
One split writes the result, turned back where that is asked for; several write partial results, which reduce.py merges.
"""

import triton
import triton.language as tl

from thalweg.ops.device.rope import turned_back, turns
from thalweg.ops.sparse_mla.tile import load_bf16, load_rest, load_rope, load_scale_bytes, load_v4, load_v32


@triton.jit
def _zeros(HEADS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.zeros([HEADS, WIDTH], tl.float32)


@triton.jit
def _load(q, there, START: tl.constexpr, WIDTH: tl.constexpr):
    return tl.load(q + START + tl.arange(0, WIDTH)[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _store(out, values, there, START: tl.constexpr, WIDTH: tl.constexpr):
    tl.store(out + START + tl.arange(0, WIDTH)[None, :], values.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def _tiles(width, lengths, row, LENGTHS: tl.constexpr, BLOCK: tl.constexpr):
    """(entries, tiles) that a row's list really has: the length clipped to [0, width]."""
    length = tl.maximum(width, 0)
    if LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), width).to(tl.int32)
    return length, (length + BLOCK - 1) // BLOCK


@triton.jit
def attend_kernel(
    q, sink, positions, frequencies, out, lse,
    cache, indices, lengths, extra_cache, extra_indices, extra_lengths,
    heads, head_tiles, width, pool, page, extra_width, extra_pool, extra_page, q_row, q_head,
    page_stride, list_row, extra_page_stride, extra_list_row, scale,
    LAYOUT: tl.constexpr, CODES: tl.constexpr, CHUNKS: tl.constexpr, STARTS: tl.constexpr,
    SLOT: tl.constexpr, LENGTHS: tl.constexpr, EXTRA_LENGTHS: tl.constexpr, SINK: tl.constexpr, SPLIT: tl.constexpr,
    ROTATE: tl.constexpr, OVERLAP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, heads, 512] and lse [rows, heads]; with SPLIT float32 [rows, splits, heads, 512] and lse in base 2."""
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
    if OVERLAP:  # with the end of what comes before, and the beginning of the merge
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // head_tiles
    head = (tl.program_id(0) - row * head_tiles) * HEADS + tl.arange(0, HEADS)
    inside = head < heads
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    length, tiles = _tiles(width, lengths, row, LENGTHS, BLOCK)
    extra_length, extra_tiles = _tiles(extra_width, extra_lengths, row, EXTRA_LENGTHS, BLOCK)
    total = tiles + extra_tiles
    first = total * split // splits
    last = total * (split + 1) // splits
    row = row.to(tl.int64)
    result = (row * splits + split) * heads + head
    there = inside
    if SPLIT:  # without a tile only the log-sum-exp is written, which says so
        there = head < tl.where(first < last, heads, 0)

    own = q + row * q_row + head[:, None] * q_head
    queries: tl.tuple = ()
    sums: tl.tuple = ()
    for c in tl.static_range(len(CHUNKS)):
        queries = queries + (_load(own, there, STARTS[c], CHUNKS[c]),)
        sums = sums + (_zeros(HEADS, CHUNKS[c]),)
    ROPE: tl.constexpr = 64
    ROPE_START: tl.constexpr = 448 if LAYOUT == "v4" else 512
    rope_queries = _load(own, there, ROPE_START, ROPE)
    rope_sums = _zeros(HEADS, ROPE)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total_weight = tl.zeros([HEADS], tl.float32)
    listed = indices + row * list_row
    extra_listed = extra_indices + row * extra_list_row
    for t in tl.range(first, last, disable_licm=True):
        entry = t * BLOCK + tl.arange(0, BLOCK)
        # One loop over both caches, so that loads run ahead across their border.
        second = t >= tiles
        entry -= tl.where(second, tiles * BLOCK, 0)
        end = tl.where(second, extra_length, length)
        of = tl.where(second, extra_listed, listed)
        slots = tl.where(second, extra_pool, pool)
        page_slots = tl.where(second, extra_page, page)
        stride = tl.where(second, extra_page_stride, page_stride)
        base = tl.where(second, extra_cache, cache)
        index = tl.load(of + entry, mask=entry < end, other=-1)
        valid = (index >= 0) & (index < slots)
        slot = tl.where(valid, index, 0).to(tl.int32)
        page_id = slot // page_slots
        slot -= page_id * page_slots
        page_id = page_id.to(tl.int64)
        page_at = page_id * stride
        at = page_at + slot * SLOT
        scale_bytes = 0
        if LAYOUT == "v4":
            scale_bytes = load_scale_bytes(base, page_at, page_slots, slot, valid)
        rope_keys = load_rope(base, at, valid, LAYOUT)
        scores = tl.dot(rope_queries, tl.trans(rope_keys))
        keys: tl.tuple = ()
        for c in tl.static_range(len(CHUNKS)):
            if LAYOUT == "v4":
                keys = keys + (load_v4(base, at, scale_bytes, valid, CODES, STARTS[c], CHUNKS[c]),)
            elif LAYOUT == "v32":
                keys = keys + (load_v32(base, at, valid, CODES, c),)
                scores += tl.dot(queries[c], tl.trans(keys[c])) * load_rest(base, at, valid, c)[None, :]
            else:
                keys = keys + (load_bf16(base, at, valid, STARTS[c], CHUNKS[c]),)
        if LAYOUT != "v32":  # all chunks before the first product: one barrier
            for c in tl.static_range(len(CHUNKS)):
                scores = tl.dot(queries[c], tl.trans(keys[c]), scores)
        scores = tl.where(valid[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf minus itself is NaN
        decay = tl.exp2(top - safe)
        weights = tl.exp2(scores - safe[:, None])
        top = new_top
        total_weight = total_weight * decay + tl.sum(weights, 1)
        factors = weights.to(tl.bfloat16)
        new_sums: tl.tuple = ()
        for c in tl.static_range(len(CHUNKS)):
            if LAYOUT == "v32":
                factors = (weights * load_rest(base, at, valid, c)[None, :]).to(tl.bfloat16)
            new_sums = new_sums + (tl.dot(factors, keys[c], sums[c] * decay[:, None]),)
        sums = new_sums
        if LAYOUT == "v4":
            rope_sums = tl.dot(factors, rope_keys, rope_sums * decay[:, None])

    below = total_weight
    if SINK and not SPLIT:
        safe = tl.where(top == float("-inf"), 0.0, top)
        below += tl.exp2(tl.load(sink + head, mask=there, other=0.0) * LOG2E - safe)
    share = tl.where(total_weight == 0, 0.0, 1.0 / below)
    into = out + result[:, None] * 512
    for c in tl.static_range(len(CHUNKS)):
        _store(into, sums[c] * share[:, None], there, STARTS[c], CHUNKS[c])
    if LAYOUT == "v4":
        rope_out = rope_sums * share[:, None]
        if ROTATE:
            pair = tl.arange(0, ROPE // 2)
            cos, sin = turns(tl.load(positions + row), frequencies, pair, pair >= 0)
            rope_out = turned_back(rope_out, cos, sin, HEADS, ROPE // 2)
        _store(into, rope_out, there, ROPE_START, ROPE)
    log_sum = top + tl.log2(total_weight)
    if not SPLIT:
        log_sum *= LN2
    tl.store(lse + result, log_sum, mask=inside)
