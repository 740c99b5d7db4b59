"""Scores and selection over the keys that are there: scores of short rows stay in scratch, those of long ones only as maxima.

First launch: the grid and the tiles of mqa_logits/triton.py; a tile's scores become keys, and maxima of four keys side by
side. A row up to DENSE entries long leaves both; a longer one only maxima of eight, so that scratch does not grow with it.
Second launch: grid = rows; in registers CAPACITY candidates, 16 a thread (topk/select.py). A long row selects its best groups
of eight, scores these again (BLOCK keys at a time, on tensor cores) and selects among them.
"""

import functools
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from thalweg.layouts.index_fp8 import WIDTH
from thalweg.layouts.sizes import INDEX_PAGE_KEYS
from thalweg.ops import hardware
from thalweg.ops.device.rows import row_of, run_of, share_of
from thalweg.ops.mqa_logits import choice as choices
from thalweg.ops.mqa_logits.live import check_live
from thalweg.ops.mqa_logits.scoring import load_at, load_queries, load_tile, score
from thalweg.ops.topk.scratch import CAPACITY, DENSE, GROUP, ROWS_AT_ONCE, scratch
from thalweg.ops.topk.select import best, candidates, side_by_side, to_key
from thalweg.ops.topk.triton import SCANS, SIZE, fill, scan_of, too_many
from thalweg.ops.variants import KernelVariant

LARGE = 8  # entries of a group, where a row has more than DENSE
LONGEST = LARGE * DENSE  # entries of a row
_RESCORED = 128  # keys that are scored again at once


@triton.jit
def keys_kernel(
    q, keys, scales, weights, lengths, pages, row_to_request, dense, maxima,
    rows, requests, heads, span, pool, q_row, q_head, page_stride, scale_stride, table_stride,
    MAPPED: tl.constexpr, DOT: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, PASS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, LARGE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Keys of the scores and their maxima of GROUP; of rows longer than DENSE the maxima of LARGE, in the keys' place."""
    program = tl.program_id(0)
    tile, end, row, row_begin = share_of(
        program, tl.num_programs(0), lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK, SCAN
    )
    while tile < end:
        request, size, longest, tiles = run_of(row, lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK)
        first = tile - row_begin
        last = tl.minimum(tiles, end - row_begin)
        if longest > 0:
            table = pages + request.to(tl.int64) * table_stride
            queries, weight = load_queries(q, weights, row, size, heads, q_row, q_head, DOT, PASS, HEADS, WIDTH, D)
            if ROWS > PASS:
                more_queries, more_weight = load_queries(
                    q, weights, row + PASS, size - PASS, heads, q_row, q_head, DOT, PASS, HEADS, WIDTH, D
                )
            j = tl.arange(0, PASS)
            _owner, length = row_of(row + j, lengths, row_to_request, rows, requests, span, MAPPED)
            length = tl.where(j < size, length, 0)
            _owner, more_length = row_of(row + PASS + j, lengths, row_to_request, rows, requests, span, MAPPED)
            more_length = tl.where(PASS + j < size, more_length, 0)
            for t in tl.range(first, last, num_stages=STAGES):
                codes, scale, there = load_tile(
                    keys, scales, table, t * BLOCK, longest, pool, page_stride, scale_stride, PAGE, WIDTH, D, BLOCK
                )
                scores = score(codes, scale, there, queries, weight, DOT, PASS, HEADS, BLOCK)
                keep_keys(scores, t, row, length, longest, dense, maxima, PASS, BLOCK, GROUP, LARGE, DENSE)
                if ROWS > PASS:
                    scores = score(codes, scale, there, more_queries, more_weight, DOT, PASS, HEADS, BLOCK)
                    keep_keys(
                        scores, t, row + PASS, more_length, longest, dense, maxima, PASS, BLOCK, GROUP, LARGE, DENSE
                    )
        tile = row_begin + last
        row_begin += tiles
        row += size


@triton.jit
def keep_keys(
    scores, t, row, length, longest, dense, maxima,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LARGE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Writes what `keys_kernel` leaves of a tile's scores [BLOCK, ROWS]."""
    key = to_key(scores)
    entry = t * BLOCK + tl.arange(0, BLOCK)[:, None]
    if ROWS > 1:  # what is beyond a shorter row of the run is none of its
        key = tl.where(entry < length[None, :], key, 0)
    own = dense + (row + tl.arange(0, ROWS)).to(tl.int64) * DENSE
    short = tl.where(length <= DENSE, length, 0)
    long = length - short
    tl.store(own[None, :] + entry, key.to(tl.int32, bitcast=True), mask=entry < short[None, :])
    group = t * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[:, None]
    of_group = tl.max(tl.reshape(key, (BLOCK // GROUP, GROUP, ROWS)), 1)
    own_maxima = maxima + (row + tl.arange(0, ROWS)).to(tl.int64) * (DENSE // GROUP)
    tl.store(own_maxima[None, :] + group, of_group.to(tl.int32, bitcast=True), mask=group * GROUP < short[None, :])
    if longest > DENSE:
        large = t * (BLOCK // LARGE) + tl.arange(0, BLOCK // LARGE)[:, None]
        of_large = tl.max(tl.reshape(of_group, (BLOCK // LARGE, LARGE // GROUP, ROWS)), 1)
        tl.store(own[None, :] + large, of_large.to(tl.int32, bitcast=True), mask=large * LARGE < long[None, :])


@triton.jit
def select_kernel(
    q, keys, scales, weights, lengths, pages, row_to_request,
    dense, maxima, chosen, list_keys, list_indices, out_indices, out_slots,
    rows, requests, heads, span, pool, k, page_slots, q_row, q_head, page_stride, scale_stride, table_stride,
    MAPPED: tl.constexpr, DOT: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LARGE: tl.constexpr, DENSE: tl.constexpr,
    SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """indices, rising, and slots int32 [rows, k], then -1."""
    row = tl.program_id(0)
    request, length = row_of(row, lengths, row_to_request, rows, requests, span, MAPPED)
    at = row.to(tl.int64)
    dense += at * DENSE
    maxima += at * (DENSE // GROUP)
    chosen += at * (DENSE // GROUP)
    list_keys += at * CAPACITY
    list_indices += at * CAPACITY
    table = pages + tl.maximum(request, 0).to(tl.int64) * table_stride
    long = length > DENSE
    entries = tl.where(long, (length + LARGE - 1) // LARGE, length)
    if long:
        for start in tl.range(0, entries, CAPACITY, num_stages=1):
            upper = start // GROUP + tl.arange(0, CAPACITY // GROUP)
            large = upper[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            some = tl.load(dense + large, mask=large < entries, other=0).to(tl.uint32, bitcast=True)
            tl.store(maxima + upper, tl.max(some, 1).to(tl.int32, bitcast=True), mask=upper * GROUP < entries)
        tl.debug_barrier()
    key, index = candidates(
        dense, entries, maxima, chosen, list_keys, list_indices, k, False, GROUP, DENSE // GROUP, SIZE, CAPACITY
    )
    if long:
        keep, place, kept, _least = best(key, k, 0, CAPACITY)
        tl.store(chosen + place, index, mask=keep)
        tl.debug_barrier()
        queries, weight = load_queries(q, weights, row, 1, heads, q_row, q_head, DOT, 1, HEADS, WIDTH, D)
        for start in tl.range(0, kept * LARGE, BLOCK, num_stages=1):
            member = start + tl.arange(0, BLOCK)
            entry = tl.load(chosen + member // LARGE, mask=member < kept * LARGE, other=span) * LARGE + member % LARGE
            live = entry < length
            page = tl.load(table + entry // PAGE, mask=live, other=-1).to(tl.int64)
            there = live & (page >= 0) & (page < pool)
            slot = entry % PAGE
            codes, scale = load_at(
                keys, scales, page * page_stride + slot * WIDTH, page * scale_stride + slot, there, WIDTH, D
            )
            scores = score(codes, scale, there, queries, weight, DOT, 1, HEADS, BLOCK)
            member_key = tl.where(live, to_key(tl.reshape(scores, (BLOCK,))), 0)
            tl.store(dense + member, member_key.to(tl.int32, bitcast=True), mask=member < kept * LARGE)
        tl.debug_barrier()
        # Side by side they lie in the order of their indices: their places are the groups 0, 1, ... of the scratch.
        key, member = side_by_side(dense, kept * LARGE, list_keys, list_indices, k, SIZE, CAPACITY)
        index = tl.load(chosen + member // LARGE, mask=key != 0, other=0) * LARGE + member % LARGE
    keep, place, found, _lowest = best(key, k, 0, CAPACITY)
    page = tl.load(table + index // PAGE, mask=keep, other=-1).to(tl.int64)
    slot = tl.where((page >= 0) & (page < pool), page * page_slots + index % PAGE, -1).to(tl.int32)
    tl.store(out_indices + at * k + place, index, mask=keep)
    tl.store(out_slots + at * k + place, slot, mask=keep)
    fill(out_indices + at * k, found, k, SIZE)
    fill(out_slots + at * k, found, k, SIZE)


def index_topk(*args) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.index_topk`: products of e4m3 where the card has them."""
    return _index_topk(False, *args)


def index_topk_f16(*args) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.index_topk`: products of float16."""
    return _index_topk(True, *args)


def rejects(q, cache, weights, lengths, page_table, k, *rest) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    span = page_table.shape[1] * cache.shape[1]
    if span > LONGEST:
        return f"rows of up to {span} entries, they hold {LONGEST} at most"
    return choices.rejects(q, cache, page_table) or too_many(k)


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
    architecture = hardware.of_device(device)
    # Runs of several rows are another kernel, whose sums may round otherwise: a row's bits would depend on its batch.
    choice = choices.choose(architecture, requests if deterministic else rows, requests, heads, exact)
    programs = choice.per_multiprocessor * hardware.multiprocessors(device)
    keys, scales = choices.codes_and_scales(cache, choice.dot)
    q, weights, lengths = choices.as_codes(q, choice.dot), weights.contiguous(), lengths.contiguous()
    indices = torch.empty(rows, k, dtype=torch.int32, device=device)
    slots = torch.empty_like(indices)
    if row_to_request is None and rows > ROWS_AT_ONCE:
        row_to_request = torch.arange(rows, dtype=torch.int32, device=device)
    mapped = row_to_request is not None
    owners = lengths if row_to_request is None else row_to_request.contiguous()
    for start in range(0, rows, ROWS_AT_ONCE):
        part = slice(start, min(rows, start + ROWS_AT_ONCE))
        count = part.stop - start
        memory = scratch(device, count)
        inputs = (q[part], keys, scales, weights[part], lengths[part], page_table, owners[part])
        strides = (q.stride(0), q.stride(1), keys.stride(0), scales.stride(0), page_table.stride(0))
        keys_variant(choice, mapped, page, scan_of(count)).launch(
            (programs,), *inputs, memory.dense, memory.maxima,
            count, requests, heads, span, cache.shape[0], *strides,
        )  # fmt: skip
        select_variant(choice.dot, choice.heads, mapped, page).launch(
            (count,), *inputs, memory.dense, memory.maxima, memory.chosen, memory.list_keys, memory.list_indices,
            indices[part], slots[part], count, requests, heads, span, cache.shape[0], k, page_slots, *strides,
        )  # fmt: skip
    return indices, slots


def _pointers(dot: str) -> dict[str, str]:
    code = "*fp8e4nv" if dot == "fp8" else "*u8"
    inputs = {"q": code, "keys": code, "scales": "*fp32", "weights": "*fp32"}
    return inputs | dict.fromkeys(("lengths", "pages", "row_to_request", "dense", "maxima"), "*i32")


_STRIDES = dict.fromkeys(("q_row", "q_head", "page_stride", "scale_stride", "table_stride"), "i64")


@functools.cache
def keys_variant(choice: choices.Choice, mapped: bool, page: int, scan: int) -> KernelVariant:
    """The kernel that scores."""
    pointers = _pointers(choice.dot)
    return KernelVariant(
        name=f"index_topk/score/{choice.label()}/{'mapped' if mapped else 'plain'}/page{page}/scan{scan}",
        kernel=keys_kernel,
        signature=pointers | dict.fromkeys(("rows", "requests", "heads", "span", "pool"), "i32") | _STRIDES,
        constexprs=choice.constexprs()
        | {
            "MAPPED": mapped,
            "PAGE": page,
            "WIDTH": WIDTH,
            "D": WIDTH,
            "SCAN": scan,
            "GROUP": GROUP,
            "LARGE": LARGE,
            "DENSE": DENSE,
        },
        divisible_by_16=(*pointers, "q_row", "q_head", "page_stride", "scale_stride"),
        num_warps=choice.warps,
        num_stages=choice.stages,
        max_registers=choice.max_registers,
        representative=choice.heads == 64 and scan == SCANS[0] and not mapped,
        matrix=True,
    )


@functools.cache
def select_variant(dot: str, heads: int, mapped: bool, page: int) -> KernelVariant:
    """The kernel that selects."""
    names = ("chosen", "list_keys", "list_indices", "out_indices", "out_slots")
    pointers = _pointers(dot) | dict.fromkeys(names, "*i32")
    scalars = ("rows", "requests", "heads", "span", "pool", "k", "page_slots")
    return KernelVariant(
        name=f"index_topk/select/{dot}/heads{heads}/{'mapped' if mapped else 'plain'}/page{page}",
        kernel=select_kernel,
        signature=pointers | dict.fromkeys(scalars, "i32") | _STRIDES,
        constexprs={
            "MAPPED": mapped,
            "DOT": dot,
            "PAGE": page,
            "HEADS": heads,
            "WIDTH": WIDTH,
            "D": WIDTH,
            "BLOCK": _RESCORED,
            "GROUP": GROUP,
            "LARGE": LARGE,
            "DENSE": DENSE,
            "SIZE": SIZE,
            "CAPACITY": CAPACITY,
        },
        divisible_by_16=(*pointers, "q_row", "q_head", "page_stride", "scale_stride"),
        num_warps=8,
        representative=heads == 64 and not mapped,
        matrix=True,
    )


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every configuration that `index_topk` can choose, for pages of 64 keys."""
    for choice in choices.all_choices(hardware):
        for mapped in (False, True):
            if choice.run_rows == 1:
                yield select_variant(choice.dot, choice.heads, mapped, INDEX_PAGE_KEYS)
            for scan in SCANS:
                yield keys_variant(choice, mapped, INDEX_PAGE_KEYS, scan)
