"""Merges the lists that the segments of each row left, selects, and translates to cache slots where a table is given.

Grid: rows x PARTS. The parts of a row share its segments where their lists are more than one load holds; each leaves what
reaches the row's bound in the list of its first segment, and the part that arrives last selects among those. Nobody waits.
In registers: CAPACITY keys and indices at a time, over all threads of the program.
"""

import triton
import triton.language as tl

from thalweg.ops.device.rows import program_of, row_of, run_of
from thalweg.ops.topk.select import absorb, best, list_of, load_list


@triton.jit
def run_with(row, programs, lengths, row_to_request, rows, requests, span,
             MAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr):  # fmt: skip
    """(first program, last program, row in its run) of a row: who scored it."""
    leader = row
    if ROWS > 1:
        request, length = row_of(row, lengths, row_to_request, rows, requests, span, MAPPED)
        together = row % ROWS > 0
        for j in tl.static_range(1, ROWS):
            other, length = row_of(row - j, lengths, row_to_request, rows, requests, span, MAPPED)
            together = together & (other == request)
            leader -= together.to(tl.int32)
            together = together & ((row - j) % ROWS > 0)
    total = tl.zeros((), tl.int32)
    begin = tl.zeros((), tl.int32)
    for base in range(0, rows, SCAN):
        other_row = base + tl.arange(0, SCAN)
        owner, size, longest, tiles = run_of(other_row, lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK)
        total += tl.sum(tiles, 0)
        begin += tl.sum(tl.where(other_row < leader, tiles, 0), 0)
    one, its_size, its_longest, its_tiles = run_of(leader, lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK)
    end = begin + its_tiles
    working = tl.minimum(programs, total)
    return program_of(begin, total, working), program_of(end - 1, total, working), row - leader


@triton.jit
def gather(keys, indices, counts, first_program, row, row_in_run, rows, first, last, step, per, start,
           ROWS: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """Candidates start ... start + SIZE - 1 of the lists first, first + step, ... < last of a row, each taken as `per` long:
    (key, index); key 0 where none is."""
    place = start + tl.arange(0, SIZE)
    number = first + place // per * step
    entry = place % per
    segment = list_of(number, first_program, row, row_in_run, rows, ROWS)
    inside = number < last
    live = inside & (entry < tl.load(counts + segment, mask=inside, other=0, cache_modifier=".cg"))
    at = segment.to(tl.int64) * CAPACITY + entry
    key = tl.load(keys + at, mask=live, other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True)
    return key, tl.load(indices + at, mask=live, other=0, cache_modifier=".cg")


@triton.jit
def collect(keys, indices, counts, first_program, row, row_in_run, rows, first, last, step, per, bar, k,
            ROWS: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """The candidates above `bar` of such lists, (key, index) [CAPACITY] in the order of their indices; key 0 = none.

    Where one load cannot hold them, they are first absorbed into the list at `first`: it is never written beyond what has
    been read.
    """
    places_there = (last - first + step - 1) // step * per
    if places_there <= CAPACITY:
        key, index = gather(keys, indices, counts, first_program, row, row_in_run, rows, first, last, step, per, 0, ROWS, CAPACITY, CAPACITY)  # fmt: skip
        key = tl.where(key > bar, key, 0)
    else:
        own = list_of(first, first_program, row, row_in_run, rows, ROWS).to(tl.int64) * CAPACITY
        count = tl.zeros((), tl.int32)
        for start in range(0, places_there, SIZE):
            some_keys, some_indices = gather(keys, indices, counts, first_program, row, row_in_run, rows, first, last, step, per, start, ROWS, SIZE, CAPACITY)  # fmt: skip
            tl.debug_barrier()
            count, bar = absorb(some_keys, some_indices, keys + own, indices + own, count, bar, k, SIZE, CAPACITY)
        tl.debug_barrier()
        key, index = load_list(keys + own, indices + own, count, CAPACITY)
        tl.debug_barrier()
    return key, index


@triton.jit
def write_row(out_indices, out_slots, row, k, keep, place, index, found, table, pool, page_slots,
              PAGE: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """The found entries, and with pages their slots; then -1 up to k."""
    at = row.to(tl.int64) * k
    tl.store(out_indices + at + place, index, mask=keep)
    if PAGE > 0:
        page = tl.load(table + index // PAGE, mask=keep, other=-1).to(tl.int64)
        slot = tl.where((page >= 0) & (page < pool), page * page_slots + index % PAGE, -1).to(tl.int32)
        tl.store(out_slots + at + place, slot, mask=keep)
    for start in range(found, k, SIZE):
        rest = start + tl.arange(0, SIZE)
        tl.store(out_indices + at + rest, -1, mask=rest < k)
        if PAGE > 0:
            tl.store(out_slots + at + rest, -1, mask=rest < k)


@triton.jit
def merge_kernel(
    list_keys, list_indices, bounds, counts, part_counts, arrivals, lengths, row_to_request, pages, out_indices, out_slots,
    rows, requests, span, programs, pool, k, page_slots, table_stride,
    MAPPED: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """indices (and slots) int32 [rows, k]."""
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    first_program, last_program, i = run_with(
        row, programs, lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK, SCAN
    )
    segments = last_program - first_program + 1
    number = tl.arange(0, PROGRAMS)
    segment = list_of(number, first_program, row, i, rows, ROWS)
    held = tl.load(counts + segment, mask=number < segments, other=0, cache_modifier=".cg")
    posted = tl.load(bounds + segment, mask=number < segments, other=-1, cache_modifier=".cg").to(tl.uint32, bitcast=True)
    bar = tl.min(posted, 0) - 1
    per = tl.maximum(tl.max(held, 0), 1)
    wanted = tl.minimum((segments * per + CAPACITY - 1) // CAPACITY, PARTS)
    step = (segments + wanted - 1) // wanted
    parts = (segments + step - 1) // step
    if part < parts:
        key, index = collect(list_keys, list_indices, counts, first_program, row, i, rows, part * step, tl.minimum(segments, (part + 1) * step), 1, per, bar, k,
                             ROWS, SIZE, CAPACITY)  # fmt: skip
        mine = True
        if parts > 1:
            found = tl.sum((key != 0).to(tl.int32), 0)
            keep, place, kept = best(key, found, k, CAPACITY)
            own = list_of(part * step, first_program, row, i, rows, ROWS)
            at = own.to(tl.int64) * CAPACITY + place
            tl.debug_barrier()
            tl.store(list_keys + at, key.to(tl.int32, bitcast=True), mask=keep)
            tl.store(list_indices + at, index, mask=keep)
            tl.store(part_counts + own, kept)
            tl.debug_barrier()
            mine = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") == parts - 1
            if mine:
                tl.store(arrivals + row, 0)
                part_at = list_of(number * step, first_program, row, i, rows, ROWS)
                part_held = tl.load(part_counts + part_at, mask=number < parts, other=0, cache_modifier=".cg")
                part_per = tl.maximum(tl.max(part_held, 0), 1)
                key, index = collect(list_keys, list_indices, part_counts, first_program, row, i, rows, 0, segments, step, part_per, bar, k,
                                     ROWS, SIZE, CAPACITY)  # fmt: skip
        if mine:
            found = tl.sum((key != 0).to(tl.int32), 0)
            keep, place, kept = best(key, found, k, CAPACITY)
            table = pages
            if PAGE > 0:
                request = row
                if MAPPED:
                    request = tl.load(row_to_request + row)
                request = tl.minimum(tl.maximum(request, 0), requests - 1)
                table = pages + request.to(tl.int64) * table_stride
            write_row(out_indices, out_slots, row, k, keep, place, index, kept, table, pool, page_slots, PAGE, SIZE)
