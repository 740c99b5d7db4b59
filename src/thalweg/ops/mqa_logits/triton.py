"""Indexer scores in Triton: a persistent grid over the tiles of real keys.

Grid: as many programs as stay resident; each takes an equal stretch of tiles of BLOCK keys, in order (ops/device/rows.py).
What a program owns, keeps in registers and in shared memory: scoring.py. The lengths are read on the device alone.
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
from thalweg.ops.mqa_logits.live import check_live, check_ragged
from thalweg.ops.mqa_logits.scoring import load_queries, load_tile, score
from thalweg.ops.variants import KernelVariant

SCANS = (16, 128, 1024)  # rows whose lengths are read at once
FILL = 4096  # columns that a program fills
RAGGED_ROWS = 2  # of a run, in ragged prefill


@triton.jit
def paged_logits_kernel(
    q, keys, scales, weights, lengths, pages, row_to_request, out,
    rows, requests, heads, span, pool, q_row, q_head, page_stride, scale_stride, table_stride, out_stride,
    MAPPED: tl.constexpr, DOT: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, PASS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out[row, :length] for every row."""
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
            own = out + (row + j).to(tl.int64) * out_stride
            for t in tl.range(first, last, num_stages=STAGES):
                codes, scale, there = load_tile(
                    keys, scales, table, t * BLOCK, longest, pool, page_stride, scale_stride, PAGE, WIDTH, D, BLOCK
                )
                entry = t * BLOCK + tl.arange(0, BLOCK)[:, None]
                scores = score(codes, scale, there, queries, weight, DOT, PASS, HEADS, BLOCK)
                tl.store(own[None, :] + entry, scores, mask=entry < length[None, :])
                if ROWS > PASS:
                    scores = score(codes, scale, there, more_queries, more_weight, DOT, PASS, HEADS, BLOCK)
                    tl.store(own[None, :] + PASS * out_stride + entry, scores, mask=entry < more_length[None, :])
        tile = row_begin + last
        row_begin += tiles
        row += size


@triton.jit
def ragged_logits_kernel(
    q, keys, scales, weights, starts, ends, run_starts, run_lengths, out,
    rows, runs, heads, span, q_row, q_head, out_stride,
    DOT: tl.constexpr, ROWS: tl.constexpr, PASS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[row, start:end] for every row: ROWS rows side by side are a run, whatever they belong to."""
    program = tl.program_id(0)
    tile, end, run, run_begin = share_of(
        program, tl.num_programs(0), run_lengths, run_lengths, runs, runs, span, False, 1, BLOCK, SCAN
    )
    while tile < end:
        _request, _size, longest, tiles = run_of(run, run_lengths, run_lengths, runs, runs, span, False, 1, BLOCK)
        first = tile - run_begin
        last = tl.minimum(tiles, end - run_begin)
        row = run * ROWS
        size = tl.minimum(rows - row, ROWS)
        if longest > 0:
            queries, weight = load_queries(q, weights, row, size, heads, q_row, q_head, DOT, ROWS, HEADS, WIDTH, D)
            j = tl.arange(0, ROWS)
            begin = tl.load(run_starts + run)
            row_start = tl.maximum(tl.load(starts + row + j, mask=j < size, other=0), 0)
            row_end = tl.minimum(tl.load(ends + row + j, mask=j < size, other=0), span)
            for t in tl.range(first, last, num_stages=STAGES):
                entry = begin + t * BLOCK + tl.arange(0, BLOCK)
                codes, scale, there = load_tile(
                    keys, scales, keys, begin + t * BLOCK, begin + longest, 1, 0, 0, 0, WIDTH, D, BLOCK
                )
                scores = score(codes, scale, there, queries, weight, DOT, ROWS, HEADS, BLOCK)
                at = (row + j).to(tl.int64)[None, :] * out_stride + entry[:, None]
                wanted = (entry[:, None] >= row_start[None, :]) & (entry[:, None] < row_end[None, :])
                tl.store(out + at, scores, mask=wanted)
        tile = run_begin + last
        run_begin += tiles
        run += 1


@triton.jit
def fill_kernel(out, lengths, width, out_stride, BLOCK: tl.constexpr):
    """out[row, max(length, 0) : width] = -inf: a program a row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dead = (column >= tl.load(lengths + row)) & (column < width)
    tl.store(out + row * out_stride + column, float("-inf"), mask=dead)


def mqa_logits(*args) -> None:
    """See `thalweg.ops.mqa_logits`: products of e4m3 where the card has them."""
    _paged(False, *args)


def mqa_logits_f16(*args) -> None:
    """See `thalweg.ops.mqa_logits`: products of float16."""
    _paged(True, *args)


def mqa_logits_rejects(q, cache, weights, lengths, page_table, row_to_request, out, clean) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    return choices.rejects(q, cache, page_table) or choices.rejects_out(out)


def _paged(
    exact: bool,
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    out: torch.Tensor,
    clean: bool,
) -> None:
    check_live(cache.shape[0], cache.shape[1], lengths, page_table, row_to_request)
    device, rows, heads, page = q.device, q.shape[0], q.shape[1], cache.shape[1]
    requests, span = page_table.shape[0], page_table.shape[1] * page
    if rows == 0:
        return
    choice = choices.choose(hardware.of_device(device), rows, requests, heads, exact)
    keys, scales = choices.codes_and_scales(cache, choice.dot)
    mapped = row_to_request is not None
    lengths = lengths.contiguous()
    logits_variant(choice, mapped, page, scan_of(rows)).launch(
        (choice.per_multiprocessor * hardware.multiprocessors(device),),
        choices.as_codes(q, choice.dot), keys, scales, weights.contiguous(), lengths, page_table,
        lengths if row_to_request is None else row_to_request.contiguous(), out,
        rows, requests, heads, span, cache.shape[0], q.stride(0), q.stride(1),
        keys.stride(0), scales.stride(0), page_table.stride(0), out.stride(0),
    )  # fmt: skip
    if clean:
        fill_variant().launch((rows, -(-out.shape[1] // FILL)), out, lengths, out.shape[1], out.stride(0))


def mqa_logits_ragged(*args) -> None:
    """See `thalweg.ops.mqa_logits_ragged`: products of e4m3 where the card has them."""
    _ragged(False, *args)


def mqa_logits_ragged_f16(*args) -> None:
    """See `thalweg.ops.mqa_logits_ragged`: products of float16."""
    _ragged(True, *args)


def mqa_logits_ragged_rejects(q, keys, scales, weights, starts, ends, out) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    if scales is None:
        return "float32 keys, they read e4m3"
    return choices.rejects_queries(q) or choices.rejects_out(out)


def _ragged(
    exact: bool,
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    device, (rows, heads, width), span = q.device, q.shape, keys.shape[0]
    check_ragged(starts, ends, span)
    if rows == 0 or span == 0:
        return
    choice = choices.choose(hardware.of_device(device), min(rows, RAGGED_ROWS), 1, heads, exact)
    run_starts, run_lengths = _runs(starts, ends, span, choice.run_rows)
    runs = run_starts.numel()
    ragged_variant(choice, width, scan_of(runs)).launch(
        (choice.per_multiprocessor * hardware.multiprocessors(device),),
        choices.as_codes(q, choice.dot), choices.as_codes(keys.contiguous(), choice.dot), scales.contiguous(),
        weights.contiguous(), starts.contiguous(), ends.contiguous(), run_starts, run_lengths, out,
        rows, runs, heads, span, q.stride(0), q.stride(1), out.stride(0),
    )  # fmt: skip


def _runs(starts: torch.Tensor, ends: torch.Tensor, span: int, run_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the keys of `run_rows` rows side by side begin, and how far they reach: int32 [runs] each."""
    empty = ends.clamp(max=span) <= starts.clamp(min=0)
    first = torch.where(empty, span, starts.clamp(min=0)).int()
    last = torch.where(empty, 0, ends.clamp(max=span)).int()
    missing = -len(starts) % run_rows
    first = torch.nn.functional.pad(first, (0, missing), value=span).view(-1, run_rows).amin(1)
    last = torch.nn.functional.pad(last, (0, missing)).view(-1, run_rows).amax(1)
    return first, (last - first).clamp(min=0)


def scan_of(rows: int) -> int:
    """How many lengths a program reads at once, for so many rows."""
    return next((scan for scan in SCANS if rows <= scan), SCANS[-1])


@functools.cache
def logits_variant(choice: choices.Choice, mapped: bool, page: int, scan: int) -> KernelVariant:
    """The kernel over the paged cache."""
    code = "*fp8e4nv" if choice.dot == "fp8" else "*u8"
    pointers = {"q": code, "keys": code, "scales": "*fp32", "weights": "*fp32"}
    pointers |= dict.fromkeys(("lengths", "pages", "row_to_request"), "*i32") | {"out": "*fp32"}
    scalars = dict.fromkeys(("rows", "requests", "heads", "span", "pool"), "i32")
    strides = dict.fromkeys(("q_row", "q_head", "page_stride", "scale_stride", "table_stride", "out_stride"), "i64")
    return KernelVariant(
        name=f"mqa_logits/{choice.label()}/{'mapped' if mapped else 'plain'}/page{page}/scan{scan}",
        kernel=paged_logits_kernel,
        signature=pointers | scalars | strides,
        constexprs=choice.constexprs() | {"MAPPED": mapped, "PAGE": page, "WIDTH": WIDTH, "D": WIDTH, "SCAN": scan},
        divisible_by_16=(*pointers, "q_row", "q_head", "page_stride", "scale_stride", "out_stride"),
        num_warps=choice.warps,
        num_stages=choice.stages,
        max_registers=choice.max_registers,
        representative=choice.heads == 64 and scan == SCANS[0] and not mapped,
        matrix=True,
    )


@functools.cache
def ragged_variant(choice: choices.Choice, width: int, scan: int) -> KernelVariant:
    """The kernel over contiguous keys of `width` channels."""
    code = "*fp8e4nv" if choice.dot == "fp8" else "*u8"
    pointers = {"q": code, "keys": code, "scales": "*fp32", "weights": "*fp32"}
    pointers |= dict.fromkeys(("starts", "ends", "run_starts", "run_lengths"), "*i32") | {"out": "*fp32"}
    return KernelVariant(
        name=f"mqa_logits_ragged/{choice.label()}/width{width}/scan{scan}",
        kernel=ragged_logits_kernel,
        signature=pointers
        | dict.fromkeys(("rows", "runs", "heads", "span"), "i32")
        | dict.fromkeys(("q_row", "q_head", "out_stride"), "i64"),
        constexprs=choice.constexprs() | {"WIDTH": width, "D": max(32, triton.next_power_of_2(width)), "SCAN": scan},
        divisible_by_16=(*pointers, "q_row", "q_head"),
        num_warps=choice.warps,
        num_stages=choice.stages,
        max_registers=choice.max_registers,
        representative=choice.heads == 64 and scan == SCANS[0],
        matrix=True,
    )


@functools.cache
def fill_variant() -> KernelVariant:
    """The kernel behind clean=True."""
    return KernelVariant(
        name="mqa_logits/fill",
        kernel=fill_kernel,
        signature={"out": "*fp32", "lengths": "*i32", "width": "i32", "out_stride": "i64"},
        constexprs={"BLOCK": FILL},
        divisible_by_16=("out", "lengths", "out_stride"),
        representative=True,
    )


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every configuration that the operations can choose, for pages of 64 keys and 128 channels."""
    yield fill_variant()
    for choice in choices.all_choices(hardware):
        for scan in SCANS:
            if choice.run_rows <= RAGGED_ROWS:
                yield ragged_variant(choice, WIDTH, scan)
            for mapped in (False, True):
                yield logits_variant(choice, mapped, INDEX_PAGE_KEYS, scan)
