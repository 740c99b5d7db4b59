"""Exact selection in Triton: a persistent grid lists candidates of the real scores, a second launch merges them.

Grid: two programs a multiprocessor, each with an equal stretch of tiles of SIZE scores (ops/device/rows.py). In registers:
one tile of keys, or a list of CAPACITY keys while it is shrunk; the lists lie in scratch memory (select.py, merge.py).
"""

import functools
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from thalweg.ops.device.rows import program_of, row_of, run_of, share_of
from thalweg.ops.hardware import Hardware, multiprocessors
from thalweg.ops.topk.merge import merge_kernel
from thalweg.ops.topk.scratch import ROWS_AT_ONCE, Scratch, scratch
from thalweg.ops.topk.select import absorb, list_of, post_bound, to_key
from thalweg.ops.variants import KernelVariant

MOST = 2048  # the highest k
SIZE = 1024  # scores of a tile
PROGRAMS = 512  # of a grid at most
SCANS = (16, 128, 1024)  # rows whose lengths are read at once
_PARTS = (1, 4)  # programs that merge a row's lists


@triton.jit
def list_kernel(
    logits, lengths, list_keys, list_indices, bounds, counts,
    rows, span, k, stride,
    SCAN: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """A list of candidates, its length and a bound for every segment of every row."""
    program = tl.program_id(0)
    total, working, tile, end, row, row_begin = share_of(
        program, tl.num_programs(0), lengths, lengths, rows, rows, span, False, 1, SIZE, SCAN
    )
    while tile < end:
        request, size, length, tiles = run_of(row, lengths, lengths, rows, rows, span, False, 1, SIZE)
        first = tile - row_begin
        last = tl.minimum(tiles, end - row_begin)
        first_program = program_of(row_begin, total, working)
        segment = list_of(program - first_program, first_program, row, 0, rows, 1)
        at = segment.to(tl.int64) * CAPACITY
        count = tl.zeros((), tl.int32)
        bar = tl.zeros((), tl.uint32)
        for t in range(first, last):
            entry = t * SIZE + tl.arange(0, SIZE)
            score = tl.load(logits + row.to(tl.int64) * stride + entry, mask=entry < length, other=0.0)
            key = tl.where(entry < length, to_key(score), 0)
            count, bar = absorb(key, entry, list_keys + at, list_indices + at, count, bar, k, SIZE, CAPACITY)
        tl.debug_barrier()
        scored = tl.maximum(tl.minimum(length, last * SIZE) - first * SIZE, 0)
        post_bound(list_keys + at, count, bounds + segment, scored, length, k, CAPACITY)
        tl.store(counts + segment, count)
        tile = row_begin + last
        row_begin += tiles
        row += size


def topk(logits: torch.Tensor, lengths: torch.Tensor, k: int, ordered: bool, deterministic: bool) -> torch.Tensor:
    """See `thalweg.ops.topk`: always deterministic here; not ordered, indices rise."""
    rows, width = logits.shape
    indices = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    programs = min(2 * multiprocessors(logits.device), PROGRAMS)
    memory = scratch(logits.device, programs, 1, capacity(k, SIZE), 0)
    for start in range(0, rows, ROWS_AT_ONCE):
        part = slice(start, min(rows, start + ROWS_AT_ONCE))
        count = part.stop - start
        variant = list_variant(scan_of(count), capacity(k, SIZE))
        variant.launch(
            (programs,),
            logits[part], lengths[part], memory.list_keys, memory.list_indices, memory.bounds, memory.counts,
            count, width, k, logits.stride(0),
        )  # fmt: skip
        merge(memory, lengths[part], None, None, indices[part], None, width, programs, 0, 0, 1, SIZE)
    return by_score(logits, indices) if ordered else indices


def rejects(logits: torch.Tensor, lengths: torch.Tensor, k: int, ordered: bool, deterministic: bool) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    return too_many(k) or (None if logits.stride(1) == 1 else f"logits of stride {logits.stride(1)} along a row, not 1")


def too_many(k: int) -> str | None:
    """Why k is too high for the kernels, or None."""
    return f"k = {k}, they hold {MOST} at most" if k > MOST else None


def by_score(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rising indices, -1 behind them, put in falling order of their scores; of equal ones the lower index first."""
    scores = logits.gather(1, indices.clamp(min=0).long()).masked_fill(indices < 0, float("-inf"))
    return indices.gather(1, torch.sort(scores, dim=1, descending=True, stable=True).indices)


def capacity(k: int, size: int) -> int:
    """Entries of a list: what a compression leaves fits into it, and `size` new ones; 1,024 at least."""
    return max(1024, 1 << (k + k // 4 + size - 1).bit_length())


def scan_of(rows: int) -> int:
    """How many lengths a program reads at once, for so many rows."""
    return next((scan for scan in SCANS if rows <= scan), SCANS[-1])


def merge(
    memory: Scratch,
    lengths: torch.Tensor,
    row_to_request: torch.Tensor | None,
    page_table: torch.Tensor | None,
    indices: torch.Tensor,
    slots: torch.Tensor | None,
    span: int,
    programs: int,
    pool: int,
    page_slots: int,
    run_rows: int,
    block: int,
    page: int = 0,
) -> None:
    """Selects from the lists that `programs` programs left in `memory`: indices [rows, k], slots where a table is given."""
    rows, k = indices.shape
    parts = _PARTS[-1] if rows * _PARTS[-1] <= 2 * multiprocessors(indices.device) else 1
    mapped = row_to_request is not None
    variant = merge_variant(mapped, page, run_rows, block, scan_of(rows), memory.list_keys.shape[1], parts)
    table = lengths if page_table is None else page_table
    variant.launch(
        (rows * parts,),
        memory.list_keys, memory.list_indices, memory.bounds, memory.counts, memory.part_counts, memory.arrivals,
        lengths, row_to_request if mapped else lengths, table, indices, indices if slots is None else slots,
        rows, rows if page_table is None else page_table.shape[0], span, programs, pool, k, page_slots,
        0 if page_table is None else page_table.stride(0),
    )  # fmt: skip


@functools.cache
def list_variant(scan: int, capacity: int) -> KernelVariant:
    """The kernel that lists the candidates of given scores."""
    pointers = {"logits": "*fp32", "lengths": "*i32"} | dict.fromkeys(
        ("list_keys", "list_indices", "bounds", "counts"), "*i32"
    )
    return KernelVariant(
        name=f"topk/list/scan{scan}/capacity{capacity}",
        kernel=list_kernel,
        signature=pointers | dict.fromkeys(("rows", "span", "k"), "i32") | {"stride": "i64"},
        constexprs={"SCAN": scan, "SIZE": SIZE, "CAPACITY": capacity},
        divisible_by_16=(*pointers, "stride"),
        num_warps=8,
        representative=scan == SCANS[0],
    )


@functools.cache
def merge_variant(
    mapped: bool, page: int, run_rows: int, block: int, scan: int, capacity: int, parts: int
) -> KernelVariant:
    """The kernel that merges lists and selects."""
    names = ("list_keys", "list_indices", "bounds", "counts", "part_counts", "arrivals", "lengths", "row_to_request", "pages")
    pointers = dict.fromkeys((*names, "out_indices", "out_slots"), "*i32")
    scalars = ("rows", "requests", "span", "programs", "pool", "k", "page_slots")
    return KernelVariant(
        name=f"topk/merge/{'mapped' if mapped else 'plain'}/page{page}/rows{run_rows}x{block}/scan{scan}/capacity{capacity}/parts{parts}",
        kernel=merge_kernel,
        signature=pointers | dict.fromkeys(scalars, "i32") | {"table_stride": "i64"},
        constexprs={
            "MAPPED": mapped, "PAGE": page, "ROWS": run_rows, "BLOCK": block, "SCAN": scan, "SIZE": SIZE,
            "CAPACITY": capacity, "PROGRAMS": PROGRAMS, "PARTS": parts,
        },  # fmt: skip
        divisible_by_16=tuple(pointers),
        num_warps=8,
        representative=scan == SCANS[0] and parts == _PARTS[-1] and page == 0,
    )


def variants(hardware: Hardware) -> Iterable[KernelVariant]:
    """Every configuration that `topk` can choose."""
    for scan in SCANS:
        for size in sorted({capacity(k, SIZE) for k in (1, MOST)}):
            yield list_variant(scan, size)
            for parts in _PARTS:
                yield merge_variant(False, 0, 1, SIZE, scan, size, parts)
