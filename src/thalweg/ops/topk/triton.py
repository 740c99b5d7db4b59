"""Exact selection in Triton: maxima of groups by many programs, then one program a row that reads the best groups.

First launch (only where rows can be longer than CAPACITY): a persistent grid, each program with an equal stretch of tiles of
TILE scores (ops/device/rows.py), which it reduces in registers. Second launch: grid = rows; in registers CAPACITY candidates,
16 a thread; how they are found: select.py.
"""

import functools
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from thalweg.ops.device.rows import run_of, share_of
from thalweg.ops.hardware import Hardware, multiprocessors
from thalweg.ops.topk.scratch import CAPACITY, DENSE, GROUP, ROWS_AT_ONCE, scratch
from thalweg.ops.topk.select import best, candidates, load_keys, members
from thalweg.ops.variants import KernelVariant

MOST = 2048  # the highest k
LARGE = (8, 32)  # entries of a group, where a row has more than DENSE
SIZE = 1024  # candidates absorbed at once where a load cannot hold all
SCANS = (16, 256)  # rows whose lengths are read at once
_TILE = 2048


@triton.jit
def maxima_kernel(
    logits, lengths, dense, maxima, rows, span, stride,
    SCAN: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, LARGE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Of rows up to DENSE long the maxima of GROUP; of longer ones those of LARGE, and the maxima of GROUP of them."""
    program = tl.program_id(0)
    tile, end, row, row_begin = share_of(
        program, tl.num_programs(0), lengths, lengths, rows, rows, span, False, 1, TILE, SCAN
    )
    while tile < end:
        _request, size, length, tiles = run_of(row, lengths, lengths, rows, rows, span, False, 1, TILE)
        first = tile - row_begin
        last = tl.minimum(tiles, end - row_begin)
        at = row.to(tl.int64)
        for t in range(first, last):
            entry = t * TILE + tl.arange(0, TILE)
            key = load_keys(logits + at * stride, entry, entry < length, True)
            if length <= DENSE:
                group = t * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
                of_group = tl.max(tl.reshape(key, (TILE // GROUP, GROUP)), 1).to(tl.int32, bitcast=True)
                tl.store(maxima + at * (DENSE // GROUP) + group, of_group, mask=group * GROUP < length)
            else:
                large = t * (TILE // LARGE) + tl.arange(0, TILE // LARGE)
                of_large = tl.max(tl.reshape(key, (TILE // LARGE, LARGE)), 1)
                tl.store(dense + at * DENSE + large, of_large.to(tl.int32, bitcast=True), mask=large * LARGE < length)
                upper = t * (TILE // LARGE // GROUP) + tl.arange(0, TILE // LARGE // GROUP)
                of_upper = tl.max(tl.reshape(of_large, (TILE // LARGE // GROUP, GROUP)), 1).to(tl.int32, bitcast=True)
                tl.store(maxima + at * (DENSE // GROUP) + upper, of_upper, mask=upper * GROUP * LARGE < length)
        tile = row_begin + last
        row_begin += tiles
        row += size


@triton.jit
def topk_kernel(
    logits, lengths, dense, maxima, chosen, list_keys, list_indices, out, span, k, stride,
    GROUP: tl.constexpr, LARGE: tl.constexpr, DENSE: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """indices int32 [rows, k], rising, then -1."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), span).to(tl.int32)
    scores = logits + row * stride
    dense += row * DENSE
    maxima += row * (DENSE // GROUP)
    chosen += row * (DENSE // GROUP)
    list_keys += row * CAPACITY
    list_indices += row * CAPACITY
    if length <= DENSE:
        key, index = candidates(
            scores, length, maxima, chosen, list_keys, list_indices, k, True, GROUP, DENSE // GROUP, SIZE, CAPACITY
        )
    else:
        larges = (length + LARGE - 1) // LARGE
        large_key, large = candidates(
            dense, larges, maxima, chosen, list_keys, list_indices, k, False, GROUP, DENSE // GROUP, SIZE, CAPACITY
        )
        keep, place, kept, low = best(large_key, k, 0, CAPACITY)
        tl.store(chosen + place, large, mask=keep)
        tl.debug_barrier()
        key, index = members(
            scores, length, chosen, kept, low - 1, list_keys, list_indices, k, True, LARGE, SIZE, CAPACITY
        )
    keep, place, found, low = best(key, k, 0, CAPACITY)
    tl.store(out + row * k + place, index, mask=keep)
    fill(out + row * k, found, k, SIZE)


@triton.jit
def fill(out, found, k, SIZE: tl.constexpr):
    """-1 behind what was found."""
    for start in range(found, k, SIZE):
        rest = start + tl.arange(0, SIZE)
        tl.store(out + rest, -1, mask=rest < k)


def topk(logits: torch.Tensor, lengths: torch.Tensor, k: int, ordered: bool, deterministic: bool) -> torch.Tensor:
    """See `thalweg.ops.topk`: always deterministic here; not ordered, indices rise."""
    rows, width = logits.shape
    indices = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    lengths = lengths.contiguous()
    large = large_group(width)
    for start in range(0, rows, ROWS_AT_ONCE):
        part = slice(start, min(rows, start + ROWS_AT_ONCE))
        count = part.stop - start
        memory = scratch(logits.device, count)
        if width > CAPACITY:
            maxima_variant(scan_of(count), large).launch(
                (4 * multiprocessors(logits.device),),
                logits[part], lengths[part], memory.dense, memory.maxima, count, width, logits.stride(0),
            )  # fmt: skip
        topk_variant(large).launch(
            (count,),
            logits[part], lengths[part], memory.dense, memory.maxima, memory.chosen, memory.list_keys,
            memory.list_indices, indices[part], width, k, logits.stride(0),
        )  # fmt: skip
    return by_score(logits, indices) if ordered else indices


def rejects(logits: torch.Tensor, lengths: torch.Tensor, k: int, ordered: bool, deterministic: bool) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    if logits.shape[1] > LARGE[-1] * DENSE:
        return f"rows of {logits.shape[1]}, they hold {LARGE[-1] * DENSE} at most"
    if logits.stride(1) != 1:
        return f"logits of stride {logits.stride(1)} along a row, not 1"
    return too_many(k)


def too_many(k: int) -> str | None:
    """Why k is too high for the kernels, or None."""
    return f"k = {k}, they hold {MOST} at most" if k > MOST else None


def by_score(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rising indices, -1 behind them, put in falling order of their scores; of equal ones the lower index first."""
    if logits.shape[1] == 0:  # nothing to gather from, and nothing but -1 to order
        return indices
    scores = logits.gather(1, indices.clamp(min=0).long()).masked_fill(indices < 0, float("-inf"))
    return indices.gather(1, torch.sort(scores, dim=1, descending=True, stable=True).indices)


def large_group(width: int) -> int:
    """Entries of a group in rows of up to `width`, where they are longer than DENSE, into which the maxima must fit."""
    return next(size for size in LARGE if width <= size * DENSE)


def scan_of(rows: int) -> int:
    """How many lengths a program reads at once, for so many rows."""
    return next((scan for scan in SCANS if rows <= scan), SCANS[-1])


@functools.cache
def maxima_variant(scan: int, large: int) -> KernelVariant:
    """The kernel that reduces scores to maxima."""
    pointers = {"logits": "*fp32", "lengths": "*i32", "dense": "*i32", "maxima": "*i32"}
    return KernelVariant(
        name=f"topk/maxima/scan{scan}/groups{large}",
        kernel=maxima_kernel,
        signature=pointers | dict.fromkeys(("rows", "span"), "i32") | {"stride": "i64"},
        constexprs={"SCAN": scan, "TILE": _TILE, "GROUP": GROUP, "LARGE": large, "DENSE": DENSE},
        divisible_by_16=(*pointers, "stride"),
        num_warps=8,
        representative=scan == SCANS[0],
    )


@functools.cache
def topk_variant(large: int) -> KernelVariant:
    """The kernel that selects."""
    names = ("lengths", "dense", "maxima", "chosen", "list_keys", "list_indices", "out")
    pointers = {"logits": "*fp32"} | dict.fromkeys(names, "*i32")
    return KernelVariant(
        name=f"topk/select/groups{large}",
        kernel=topk_kernel,
        signature=pointers | {"span": "i32", "k": "i32", "stride": "i64"},
        constexprs={"GROUP": GROUP, "LARGE": large, "DENSE": DENSE, "SIZE": SIZE, "CAPACITY": CAPACITY},
        divisible_by_16=(*pointers, "stride"),
        num_warps=8,
        representative=True,
    )


def variants(hardware: Hardware) -> Iterable[KernelVariant]:
    """Every configuration that `topk` can choose."""
    for large in LARGE:
        yield topk_variant(large)
        for scan in SCANS:
            yield maxima_variant(scan, large)
