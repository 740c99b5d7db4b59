"""Scores and selection over the keys that are there: the scores are never written out.

Grid and tiles: as mqa_logits/triton.py. Scores of up to FRESH entries go to a program's own stretch of scratch (it stays in
L2); what exceeds the bar is absorbed into the list of the segment (topk/select.py), and topk/merge.py selects in a second
launch. Scratch: a list of CAPACITY entries a row, and one more for each row of the run that a program goes on with: whatever
the lengths and the table's width.
"""

import functools
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from thalweg.layouts.index_fp8 import WIDTH
from thalweg.layouts.sizes import INDEX_PAGE_KEYS
from thalweg.ops import hardware
from thalweg.ops.device.rows import program_of, row_of, run_of, share_of
from thalweg.ops.mqa_logits import choice as mqa_choice
from thalweg.ops.mqa_logits.live import check_live
from thalweg.ops.mqa_logits.scoring import load_queries, tile_scores
from thalweg.ops.topk.scratch import ROWS_AT_ONCE, scratch
from thalweg.ops.topk.select import absorb, list_of, post_bound, to_key
from thalweg.ops.topk.triton import MOST, PROGRAMS, SCANS, capacity, merge, scan_of, too_many
from thalweg.ops.variants import KernelVariant

FRESH = 1024  # scores that wait to be absorbed, of a row
SIZE = 256  # of them absorbed at once


@triton.jit
def element(vector, j, SIZE: tl.constexpr):
    """vector[j]"""
    return tl.sum(tl.where(tl.arange(0, SIZE) == j, vector, 0), 0)


@triton.jit
def index_score_kernel(
    q, keys, scales, weights, lengths, pages, row_to_request,
    list_keys, list_indices, fresh, bounds, counts,
    rows, requests, heads, span, pool, k, q_row, q_head, page_stride, scale_stride, table_stride,
    MAPPED: tl.constexpr, DOT: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    STAGES: tl.constexpr, FRESH: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """A list of candidates, its length and a bound for every segment of every row."""
    program = tl.program_id(0)
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
        segments = list_of(program - first_program, first_program, row, 0, rows, ROWS)
        if longest > 0:
            queries, weight = load_queries(q, weights, row, size, heads, q_row, q_head, DOT, ROWS, HEADS, WIDTH, D)
            for begin in range(first, last, FRESH // BLOCK):
                stop = tl.minimum(begin + FRESH // BLOCK, last)
                for t in tl.range(begin, stop, num_stages=STAGES):
                    entry = t * BLOCK + tl.arange(0, BLOCK)
                    scores = tile_scores(keys, scales, table, t * BLOCK, longest, pool, page_stride, scale_stride, queries, weight,
                                         DOT, PAGE, ROWS, HEADS, WIDTH, D, BLOCK)  # fmt: skip
                    at = j[None, :] * FRESH + (entry - begin * BLOCK)[:, None]
                    tl.store(own + at, scores)
                tl.debug_barrier()
                for i in range(0, size):
                    at = (segments + i).to(tl.int64) * CAPACITY
                    row_length = tl.minimum(element(length, i, ROWS), stop * BLOCK)
                    new_count = element(count, i, ROWS)
                    new_bar = element(bar, i, ROWS).to(tl.uint32)
                    for start in tl.range(begin * BLOCK, row_length, SIZE, num_stages=1):
                        entry = start + tl.arange(0, SIZE)
                        score = tl.load(own + i * FRESH + entry - begin * BLOCK, mask=entry < row_length, other=0.0)
                        key = tl.where(entry < row_length, to_key(score), 0)
                        new_count, new_bar = absorb(key, entry, list_keys + at, list_indices + at, new_count, new_bar, k, SIZE, CAPACITY)
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


def index_topk(*args) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.index_topk`: products of e4m3 where the card has them."""
    return _index_topk(False, *args)


def index_topk_f16(*args) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.index_topk`: products of float16."""
    return _index_topk(True, *args)


def rejects(q, cache, weights, lengths, page_table, k, *rest) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    return mqa_choice.rejects(q, cache) or too_many(k)


def _index_topk(
    exact: bool,
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
    row_to_request: torch.Tensor | None,
    page_slots: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_live(cache.shape[0], cache.shape[1], lengths, page_table, row_to_request)
    device, rows, heads, page = q.device, q.shape[0], q.shape[1], cache.shape[1]
    requests, span = page_table.shape[0], page_table.shape[1] * page
    choice = mqa_choice.choose(hardware.of_device(device), rows, requests, heads, exact)
    programs = min(choice.per_multiprocessor * hardware.multiprocessors(device), PROGRAMS)
    memory = scratch(device, programs, choice.run_rows, capacity(k, SIZE), FRESH)
    keys, scales = mqa_choice.codes_and_scales(cache, choice.dot)
    q, weights, lengths = mqa_choice.as_codes(q, choice.dot), weights.contiguous(), lengths.contiguous()
    indices = torch.empty(rows, k, dtype=torch.int32, device=device)
    slots = torch.empty_like(indices)
    for start in range(0, rows, ROWS_AT_ONCE):
        part = slice(start, min(rows, start + ROWS_AT_ONCE))
        count = part.stop - start
        owners = None if row_to_request is None else row_to_request[part]
        if owners is None and count < rows:
            owners = torch.arange(start, part.stop, dtype=torch.int32, device=device)
        variant = score_variant(choice, owners is not None, page, scan_of(count), capacity(k, SIZE))
        variant.launch(
            (programs,),
            q[part], keys, scales, weights[part], lengths[part], page_table, lengths if owners is None else owners,
            memory.list_keys, memory.list_indices, memory.fresh, memory.bounds, memory.counts,
            count, requests, heads, span, cache.shape[0], k, q.stride(0), q.stride(1),
            keys.stride(0), scales.stride(0), page_table.stride(0),
        )  # fmt: skip
        merge(
            memory, lengths[part], owners, page_table, indices[part], slots[part], span, programs, cache.shape[0],
            page_slots, choice.run_rows, choice.block, page,
        )  # fmt: skip
    return indices, slots


@functools.cache
def score_variant(choice: mqa_choice.Choice, mapped: bool, page: int, scan: int, capacity: int) -> KernelVariant:
    """The kernel that scores and lists candidates."""
    code = "*fp8e4nv" if choice.dot == "fp8" else "*u8"
    pointers = {"q": code, "keys": code, "scales": "*fp32", "weights": "*fp32"}
    pointers |= dict.fromkeys(("lengths", "pages", "row_to_request", "list_keys", "list_indices"), "*i32")
    pointers |= {"fresh": "*fp32", "bounds": "*i32", "counts": "*i32"}
    scalars = dict.fromkeys(("rows", "requests", "heads", "span", "pool", "k"), "i32")
    strides = dict.fromkeys(("q_row", "q_head", "page_stride", "scale_stride", "table_stride"), "i64")
    return KernelVariant(
        name=f"index_topk/{choice.label()}/{'mapped' if mapped else 'plain'}/page{page}/scan{scan}/capacity{capacity}",
        kernel=index_score_kernel,
        signature=pointers | scalars | strides,
        constexprs=choice.constexprs()
        | {"MAPPED": mapped, "PAGE": page, "WIDTH": WIDTH, "D": WIDTH, "SCAN": scan, "FRESH": FRESH, "SIZE": SIZE, "CAPACITY": capacity},
        divisible_by_16=(*pointers, "q_row", "q_head", "page_stride", "scale_stride"),
        num_warps=choice.warps,
        num_stages=choice.stages,
        max_registers=choice.max_registers,
        representative=choice.heads == 64 and scan == 16 and not mapped,
        matrix=True,
    )


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every configuration that `index_topk` can choose, for pages of 64 keys."""
    for choice in mqa_choice.all_choices(hardware):
        for scan in SCANS:
            for size in sorted({capacity(k, SIZE) for k in (512, MOST)}):
                for mapped in (False, True):
                    yield score_variant(choice, mapped, INDEX_PAGE_KEYS, scan, size)
