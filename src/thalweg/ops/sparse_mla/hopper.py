"""Attention over index lists on Hopper (hopper.cu): launches, and when they are possible."""

import functools
import itertools
import math
from collections.abc import Iterable

import torch

from thalweg.layouts import v4, v32
from thalweg.layouts.registry import layout_of
from thalweg.ops import cuda, hardware
from thalweg.ops.cuda import CudaVariant
from thalweg.ops.sparse_mla import choice as choices
from thalweg.ops.sparse_mla import tile
from thalweg.ops.sparse_mla.triton import VALUE_DIM, Turn, by_splits, check_lists, rejects_turn

TILE = 64  # heads, and cached rows
_THREADS = 512
_SHARED_MEMORY = 227 * 1024  # all that a block can have
_CHOICE = choices.Choice(TILE, TILE, _THREADS // 32, 2, 1)
_POINTERS = (
    "q", "sink", "out", "lse", "cache", "indices", "lengths", "extra_cache", "extra_indices", "extra_lengths",
)  # fmt: skip
_INTEGERS = ("heads", "head_tiles", "width", "pool", "page", "extra_width", "extra_pool", "extra_page")
_STRIDES = (
    "q_row",
    "q_head",
    "page_stride",
    "divide",
    "list_row",
    "extra_page_stride",
    "extra_divide",
    "extra_list_row",
)


def rejects(
    q, cache, indices, lengths, sink, extra_cache, extra_indices, extra_lengths, scale, deterministic,
    positions=None, inverse_frequencies=None,
) -> str | None:  # fmt: skip
    """Why these arguments are not for the kernel, or None."""
    if reason := rejects_turn(inverse_frequencies):
        return reason
    if q.dtype != torch.bfloat16:
        return f"q of {q.dtype}, its products are of bfloat16"
    if not scale > 0:
        return f"scale {scale}: it takes the largest product of a row for its largest score"
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16:
        return f"q of strides {q.stride()} at address {q.data_ptr():#x}: heads are not 16 bytes apart or a multiple"
    lists = {"cache": (cache, indices)}
    if extra_cache is not None:
        lists["extra cache"] = (extra_cache, extra_indices)
    for name, (each, listed) in lists.items():
        layout = layout_of(each)
        if layout not in (v4, v32) or layout is not layout_of(cache):
            return f"{name}: of layout {layout.NAME}, it reads {v4.NAME} or {v32.NAME}, and all caches alike"
        if each.stride(0) % 16 or each.data_ptr() % 16:
            return f"{name}: pages {each.stride(0)} bytes apart at address {each.data_ptr():#x}, not multiples of 16"
        if listed.dtype != torch.int32 or (listed.stride(1) != 1 and listed.shape[1] > 1):
            return (
                f"{name}: {listed.dtype} indices of stride {listed.stride(1)} along a row, it reads int32 side by side"
            )
        if reason := tile.rejects_cache(name, each):
            return reason
    return None


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
    positions: torch.Tensor | None = None,
    inverse_frequencies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.sparse_mla`."""
    check_lists(cache, indices, lengths)
    if extra_cache is None or extra_indices is None:
        extra_cache, extra_indices, extra_lengths = cache, indices[:, :0], None
    else:
        check_lists(extra_cache, extra_indices, extra_lengths)
    device, (rows, heads) = q.device, q.shape[:2]
    out = torch.empty(rows, heads, VALUE_DIM, dtype=q.dtype, device=device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
    if rows == 0:
        return out, lse
    head_tiles = -(-heads // TILE)
    tiles = sum(-(-each.shape[1] // TILE) for each in (indices, extra_indices))
    splits = choices.splits_of(_CHOICE, rows * head_tiles, tiles, hardware.multiprocessors(device), deterministic)
    amounts = [None if each is None else cuda.as_int32(each) for each in (lengths, extra_lengths)]
    sinks = None if sink is None else sink.contiguous()
    main, other = tile.rows(cache), tile.rows(extra_cache)

    def launch(some: slice, into: torch.Tensor, into_lse: torch.Tensor) -> None:
        own, extra = (None if each is None else each[some] for each in amounts)
        attend_variant(layout_of(cache).NAME, splits > 1).launch(
            ((some.stop - some.start) * head_tiles, splits),
            q[some], sinks, into, into_lse, main, indices[some], own, other, extra_indices[some], extra,
            heads, head_tiles, indices.shape[1], cache.shape[0] * cache.shape[1], cache.shape[1],
            extra_indices.shape[1], extra_cache.shape[0] * extra_cache.shape[1], extra_cache.shape[1],
            2 * q.stride(0), 2 * q.stride(1), main.stride(0), divide(cache.shape[1]), indices.stride(0),
            other.stride(0), divide(extra_cache.shape[1]), extra_indices.stride(0), scale * math.log2(math.e),
        )  # fmt: skip

    by_splits(
        splits, out, lse, sink, launch, Turn.of(positions, inverse_frequencies), turns_itself=False, overlap=q.is_cuda
    )
    return out, lse


@functools.cache
def divide(divisor: int) -> int:
    """How the kernel divides numbers below 2^31 by `divisor`: a multiplier, and a shift in the bits from 32 on."""
    shift = (divisor - 1).bit_length()
    return -(-(2 ** (31 + shift)) // divisor) | shift << 32


@functools.cache
def attend_variant(layout: str, split: bool) -> CudaVariant:
    """The kernel."""
    return CudaVariant(
        name=f"sparse_mla/hopper/{layout}/{'split' if split else 'whole'}",
        source="sparse_mla/hopper.cu",
        entry="attend_kernel",
        defines={
            "V32": int(layout == v32.NAME),
            "SPLIT": int(split),
            "OUT": "float" if split else "u16",
            "SHARED": _SHARED_MEMORY,
        },
        signature=dict.fromkeys(_POINTERS, "p")
        | dict.fromkeys(_INTEGERS, "i")
        | dict.fromkeys(_STRIDES, "l")
        | {"scale": "f"},
        threads=_THREADS,
        overlaps=True,
        shared_memory=_SHARED_MEMORY,
        representative=True,
        matrix=True,
    )


def variants(hardware: hardware.Hardware) -> Iterable[CudaVariant]:
    """Every configuration that the operation can choose."""
    if hardware.name == "sm_90":
        for layout, split in itertools.product((v4.NAME, v32.NAME), (False, True)):
            yield attend_variant(layout, split)
