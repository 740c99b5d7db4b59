"""How a persistent grid divides rows of unlike lengths: tiles of BLOCK entries, the real ones, in equal shares.

Up to ROWS rows that lie side by side and belong to one request are a run and share what they read. A run has a tile at least,
so that somebody answers for an empty row. Programs beyond the number of tiles have nothing to do.
"""

import triton
import triton.language as tl


@triton.jit
def row_of(row, lengths, row_to_request, rows, requests, span, MAPPED: tl.constexpr):
    """(request, length) of rows: the length clipped to [0, span], 0 for rows and requests that do not exist."""
    inside = (row >= 0) & (row < rows)
    request = row
    if MAPPED:
        request = tl.load(row_to_request + row, mask=inside, other=-1)
    known = inside & (request >= 0) & (request < requests)
    length = tl.minimum(tl.maximum(tl.load(lengths + row, mask=known, other=0), 0), span)
    return tl.where(known, request, -1).to(tl.int32), length.to(tl.int32)


@triton.jit
def run_of(
    row, lengths, row_to_request, rows, requests, span, MAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """(request, rows, longest, tiles) of the runs that begin at `row`: no tiles where none begins."""
    request, longest = row_of(row, lengths, row_to_request, rows, requests, span, MAPPED)
    begins = row < rows
    size = begins.to(tl.int32)
    if ROWS > 1:
        before, _ = row_of(row - 1, lengths, row_to_request, rows, requests, span, MAPPED)
        begins = begins & ((row % ROWS == 0) | (request != before))
        together = begins
        for j in tl.static_range(1, ROWS):
            other, length = row_of(row + j, lengths, row_to_request, rows, requests, span, MAPPED)
            together = together & (row + j < rows) & ((row + j) % ROWS != 0) & (other == request)
            longest = tl.where(together, tl.maximum(longest, length), longest)
            size += together.to(tl.int32)
    tiles = tl.where(begins, tl.maximum((longest + BLOCK - 1) // BLOCK, 1), 0)
    return request, size, longest, tiles


@triton.jit
def share_of(program, programs, lengths, row_to_request, rows, requests, span,
             MAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr):  # fmt: skip
    """(first tile, end tile, row of the first tile, that row's first tile) of a program's share."""
    total = tl.zeros((), tl.int32)
    for base in range(0, rows, SCAN):
        row = base + tl.arange(0, SCAN)
        _, _, _, tiles = run_of(row, lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK)
        total += tl.sum(tiles, 0)
    working = tl.minimum(programs, total)
    each = total // tl.maximum(working, 1)
    more = total - each * working  # so many programs take one tile more
    first = program * each + tl.minimum(program, more)
    end = first + each + (program < more).to(tl.int32)
    before = tl.zeros((), tl.int32)
    first_row = tl.zeros((), tl.int32)
    row_begin = tl.zeros((), tl.int32)
    if program < working:
        for base in range(0, rows, SCAN):
            row = base + tl.arange(0, SCAN)
            _, _, _, tiles = run_of(row, lengths, row_to_request, rows, requests, span, MAPPED, ROWS, BLOCK)
            ends = before + tl.cumsum(tiles, 0)
            passed = (ends <= first) & (row < rows)
            first_row += tl.sum(passed.to(tl.int32), 0)
            row_begin = tl.maximum(row_begin, tl.max(tl.where(passed, ends, 0), 0))
            before += tl.sum(tiles, 0)
    else:
        end = first
    return first, end, first_row, row_begin
