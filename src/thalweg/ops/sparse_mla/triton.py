"""Attention over index lists in Triton: lists divided into splits, each an online softmax over tiles of cached rows.

Grid: (rows x head tiles, splits). A program owns HEADS heads of one row (padded to the tile) and an equal share of the tiles
of BLOCK entries that the row's lists really have, the second cache's after the first's. In registers: HEADS x 512 float32
sums. In shared memory: the queries, the cached rows as stored (a tile ahead), and decoded to bf16, once for both products.
One split writes the result; several write partial results, which reduce.py merges.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable

import torch
import triton
import triton.language as tl

from thalweg.layouts.registry import layout_of
from thalweg.ops import hardware
from thalweg.ops.checks import debug_checks, in_pool
from thalweg.ops.sparse_mla import choice as choices
from thalweg.ops.sparse_mla import tile
from thalweg.ops.sparse_mla.reduce import reduce_kernel
from thalweg.ops.sparse_mla.tile import load_bf16, load_rest, load_rope, load_scale_bytes, load_v4, load_v32
from thalweg.ops.variants import KernelVariant

VALUE_DIM = 512
GROUP = 8  # partial results that are merged at once


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
    q, sink, out, lse,
    cache, indices, lengths, extra_cache, extra_indices, extra_lengths,
    heads, head_tiles, width, pool, page, extra_width, extra_pool, extra_page, q_row, q_head,
    page_stride, list_row, extra_page_stride, extra_list_row, scale,
    LAYOUT: tl.constexpr, CODES: tl.constexpr, CHUNKS: tl.constexpr, STARTS: tl.constexpr,
    SLOT: tl.constexpr, LENGTHS: tl.constexpr, EXTRA_LENGTHS: tl.constexpr, SINK: tl.constexpr, SPLIT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, heads, 512] and lse [rows, heads]; with SPLIT float32 [rows, splits, heads, 512] and lse in base 2."""
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
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
        _store(into, rope_sums * share[:, None], there, ROPE_START, ROPE)
    log_sum = top + tl.log2(total_weight)
    if not SPLIT:
        log_sum *= LN2
    tl.store(lse + result, log_sum, mask=inside)


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_lengths: torch.Tensor | None,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.sparse_mla`."""
    check_lists(cache, indices, lengths)
    if extra_cache is None or extra_indices is None:
        extra_cache, extra_indices = cache, indices[:, :0]
    else:
        check_lists(extra_cache, extra_indices, extra_lengths)
    device, (rows, heads) = q.device, q.shape[:2]
    out = torch.empty(rows, heads, VALUE_DIM, dtype=q.dtype, device=device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
    if rows == 0:
        return out, lse
    if q.stride(2) != 1:
        q = q.contiguous()
    if extra_indices.dtype != indices.dtype:  # one loop reads both
        indices, extra_indices = indices.long(), extra_indices.long()
    indices, extra_indices = (each if each.stride(1) == 1 else each.contiguous() for each in (indices, extra_indices))
    card, layout = hardware.of_device(device), layout_of(cache).NAME
    if deterministic:  # not by the number of rows
        chosen = choices.choose(card, layout, heads)
    else:
        widths = (indices.shape[1], extra_indices.shape[1])
        chosen = choices.choose_at_once(card, layout, heads, rows, widths, hardware.multiprocessors(device))
    head_tiles = -(-heads // chosen.heads)
    tiles = sum(-(-each.shape[1] // chosen.block) for each in (indices, extra_indices))
    splits = choices.splits_of(chosen, rows * head_tiles, tiles, hardware.multiprocessors(device), deterministic)
    flags = (lengths is not None, extra_lengths is not None, sink is not None, splits > 1)
    variant = attend_variant(chosen, layout, card.e4m3_to_f16, *flags)
    main, other = tile.rows(cache), tile.rows(extra_cache)
    sinks = lse if sink is None else sink.contiguous()

    def launch(some: slice, into: torch.Tensor, into_lse: torch.Tensor) -> None:
        lists = [
            (each[some], each if amounts is None else amounts[some].contiguous())
            for each, amounts in ((indices, lengths), (extra_indices, extra_lengths))
        ]
        variant.launch(
            ((some.stop - some.start) * head_tiles, splits),
            q[some], sinks, into, into_lse,
            main, *lists[0], other, *lists[1],
            heads, head_tiles, indices.shape[1], cache.shape[0] * cache.shape[1], cache.shape[1],
            extra_indices.shape[1], extra_cache.shape[0] * extra_cache.shape[1], extra_cache.shape[1],
            q.stride(0), q.stride(1), main.stride(0), indices.stride(0), other.stride(0), extra_indices.stride(0),
            scale * math.log2(math.e),
        )  # fmt: skip

    by_splits(splits, out, lse, sink, launch)
    return out, lse


def by_splits(
    splits: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    launch: Callable[[slice, torch.Tensor, torch.Tensor], None],
) -> None:
    """Calls launch(rows, results, log-sum-exps) for as many rows at once as scratch holds, and merges their splits."""
    rows, heads = lse.shape
    slab = rows if splits == 1 else max(1, choices.SCRATCH_BYTES // (splits * heads * VALUE_DIM * 4))
    for begin in range(0, rows, slab):
        some = slice(begin, min(rows, begin + slab))
        if splits == 1:
            launch(some, out[some], lse[some])
            continue
        partial, partial_lse = scratch(some.stop - begin, splits, heads, out.device)
        launch(some, partial, partial_lse)
        reduce_variant(sink is not None, triton.next_power_of_2(splits)).launch(
            (some.stop - begin, heads),
            partial, partial_lse, partial_lse if sink is None else sink.contiguous(), out[some], lse[some], heads, splits,
        )  # fmt: skip


def scratch(rows: int, splits: int, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results and their log-sum-exps, from torch's allocator at every call: streams and graphs never share them."""
    partial = torch.empty(rows, splits, heads, VALUE_DIM, dtype=torch.float32, device=device)
    return partial, torch.empty(rows, splits, heads, dtype=torch.float32, device=device)


def sparse_mla_rejects(
    q, cache, indices, lengths, sink, extra_cache, extra_indices, extra_lengths, scale, deterministic
) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    if q.dtype != torch.bfloat16:
        return f"q of {q.dtype}, their products are of bfloat16"
    reason = tile.rejects_cache("cache", cache)
    if reason or extra_cache is None:
        return reason
    if layout_of(extra_cache) is not layout_of(cache):
        return f"caches of two layouts, {layout_of(cache).NAME} and {layout_of(extra_cache).NAME}"
    return tile.rejects_cache("extra cache", extra_cache)


def check_lists(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None) -> None:
    """With THALWEG_CHECK=1 raises IndexError for a listed slot that is not in the pool; reads the device."""
    if not debug_checks():
        return
    active = indices != -1
    if lengths is not None:
        active &= torch.arange(indices.shape[1], device=indices.device) < lengths.unsqueeze(1)
    in_pool("indices", indices, active, cache.shape[0] * cache.shape[1])


_POINTERS = {"q": "*bf16", "sink": "*fp32"}
_SCALARS = (
    "heads", "head_tiles", "width", "pool", "page", "extra_width", "extra_pool", "extra_page",
)  # fmt: skip
_STRIDES = ("q_row", "q_head", "page_stride", "list_row", "extra_page_stride", "extra_list_row")


@functools.cache
def attend_variant(
    choice: choices.Choice,
    layout: str,
    e4m3_to_f16: str,
    lengths: bool,
    extra_lengths: bool,
    sink: bool,
    split: bool,
) -> KernelVariant:
    """The attention kernel."""
    pointers = {"q": "*bf16", "sink": "*fp32", "out": "*fp32" if split else "*bf16", "lse": "*fp32"}
    for prefix in ("", "extra_"):
        pointers |= {prefix + "cache": tile.pointer(layout), prefix + "indices": "*i32", prefix + "lengths": "*i32"}
    integers = dict.fromkeys(_SCALARS, "i32") | dict.fromkeys(_STRIDES, "i64")
    flags = {"LENGTHS": lengths, "EXTRA_LENGTHS": extra_lengths, "SINK": sink, "SPLIT": split}
    names = [name.lower() for name, value in flags.items() if value]
    how = "" if layout == "mla_bf16" else f"/{e4m3_to_f16}"
    return KernelVariant(
        name="/".join(["sparse_mla", layout + how, choice.label(), "+".join(names) or "plain"]),
        kernel=attend_kernel,
        signature=pointers | integers | {"scale": "fp32"},
        constexprs=tile.constexprs(layout, e4m3_to_f16) | flags | {"HEADS": choice.heads, "BLOCK": choice.block},
        divisible_by_16=(*pointers, "q_row", "q_head", "page_stride", "extra_page_stride"),
        num_warps=choice.warps,
        num_stages=choice.stages,
        max_registers=choice.max_registers,
        representative=sink and split and not lengths and not extra_lengths,
        matrix=True,
    )  # fmt: skip


@functools.cache
def reduce_variant(sink: bool, splits: int) -> KernelVariant:
    """The kernel that merges up to `splits` splits, a power of two."""
    return KernelVariant(
        name=f"sparse_mla/reduce/splits{splits}/{'sink' if sink else 'plain'}",
        kernel=reduce_kernel,
        signature=dict.fromkeys(("partial", "partial_lse", "sink"), "*fp32")
        | {"out": "*bf16", "lse": "*fp32", "heads": "i32", "splits": "i32"},
        constexprs={"SINK": sink, "SPLITS": splits, "GROUP": min(GROUP, splits)},
        divisible_by_16=("partial", "partial_lse", "sink", "out", "lse"),
        representative=sink and splits == choices.MOST_SPLITS,
    )


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every configuration that the operation can choose."""
    switches = (False, True)
    for sink in switches:
        splits = 2
        while splits <= choices.MOST_SPLITS:
            yield reduce_variant(sink, splits)
            splits *= 2
    for layout in tile.LAYOUTS:
        for choice in choices.all_choices(hardware, layout):
            for flags in itertools.product(switches, repeat=4):
                yield attend_variant(choice, layout, hardware.e4m3_to_f16, *flags)
