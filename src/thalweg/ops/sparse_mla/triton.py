"""Attention over index lists in Triton: launches, and the variants there are. The kernels: attend.py and reduce.py."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import triton

from thalweg.layouts import v4
from thalweg.layouts.registry import layout_of
from thalweg.ops import hardware
from thalweg.ops.checks import debug_checks, in_pool
from thalweg.ops.sparse_mla import choice as choices
from thalweg.ops.sparse_mla import tile
from thalweg.ops.sparse_mla.attend import attend_kernel
from thalweg.ops.sparse_mla.reduce import reduce_kernel, rotate_kernel
from thalweg.ops.variants import KernelVariant

VALUE_DIM = 512
ROPE_PAIRS = 32  # that the kernels turn back: the last of 512 channels
GROUP = 8  # partial results that are merged at once


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
    *,
    choice: choices.Choice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.sparse_mla`. choice: this configuration in place of the table's, to measure it."""
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
    if choice is not None:
        chosen = choice
    elif deterministic:  # not by the number of rows
        chosen = choices.choose(card, layout, heads)
    else:
        widths = (indices.shape[1], extra_indices.shape[1])
        chosen = choices.choose_at_once(card, layout, heads, rows, widths, hardware.multiprocessors(device))
    head_tiles = -(-heads // chosen.heads)
    tiles = sum(-(-each.shape[1] // chosen.block) for each in (indices, extra_indices))
    splits = choices.splits_of(chosen, rows * head_tiles, tiles, hardware.multiprocessors(device), deterministic)
    turn = Turn.of(positions, inverse_frequencies)
    flags = (
        lengths is not None,
        extra_lengths is not None,
        sink is not None,
        splits > 1,
        turn is not None and splits == 1,
    )
    overlap = device.type == "cuda" and can_overlap(card)
    variant = attend_variant(chosen, layout, card.e4m3_to_f16, *flags, overlap=overlap)
    main, other = tile.rows(cache), tile.rows(extra_cache)
    sinks = lse if sink is None else sink.contiguous()

    def launch(some: slice, into: torch.Tensor, into_lse: torch.Tensor) -> None:
        lists = [
            (each[some], each if amounts is None else amounts[some].contiguous())
            for each, amounts in ((indices, lengths), (extra_indices, extra_lengths))
        ]
        variant.launch(
            ((some.stop - some.start) * head_tiles, splits),
            q[some], sinks, *Turn.arguments(turn, some, lse), into, into_lse,
            main, *lists[0], other, *lists[1],
            heads, head_tiles, indices.shape[1], cache.shape[0] * cache.shape[1], cache.shape[1],
            extra_indices.shape[1], extra_cache.shape[0] * extra_cache.shape[1], extra_cache.shape[1],
            q.stride(0), q.stride(1), main.stride(0), indices.stride(0), other.stride(0), extra_indices.stride(0),
            scale * math.log2(math.e),
        )  # fmt: skip

    by_splits(splits, out, lse, sink, launch, turn, overlap=overlap)
    return out, lse


@dataclass(frozen=True)
class Turn:
    """By what results are turned back."""

    positions: torch.Tensor
    inverse_frequencies: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor | None, inverse_frequencies: torch.Tensor | None) -> "Turn | None":
        """Contiguous; None where nothing is turned."""
        if positions is None or inverse_frequencies is None:
            return None
        return cls(positions.contiguous(), inverse_frequencies.contiguous())

    @staticmethod
    def arguments(turn: "Turn | None", some: slice, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a launch over some rows passes: float32 `unused` where nothing is turned."""
        return (unused, unused) if turn is None else (turn.positions[some], turn.inverse_frequencies)


def can_overlap(card: hardware.Hardware) -> bool:
    """Whether kernels begin while those before them end (programmatic dependent launch): where that was measured."""
    return card.name == "sm_90"


def by_splits(
    splits: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    launch: Callable[[slice, torch.Tensor, torch.Tensor], None],
    turn: Turn | None = None,
    turns_itself: bool = True,
    overlap: bool = False,
) -> None:
    """Calls launch(rows, results, log-sum-exps) for as many rows at once as scratch holds, and merges their splits.

    turn: the merge turns results back by it. One split is not merged: there the launch does (`turns_itself`), or one more.
    """
    rows, heads = lse.shape
    slab = rows if splits == 1 else max(1, choices.SCRATCH_BYTES // (splits * heads * VALUE_DIM * 4))
    for begin in range(0, rows, slab):
        some = slice(begin, min(rows, begin + slab))
        if splits == 1:
            launch(some, out[some], lse[some])
            if turn is not None and not turns_itself:
                rotate_variant().launch((rows, heads), out, turn.positions, turn.inverse_frequencies, heads)
            continue
        partial, partial_lse = scratch(some.stop - begin, splits, heads, out.device)
        early = overlap and partial_lse.numel() <= choices.MOST_OVERLAPPED
        launch(some, partial, partial_lse)
        reduce_variant(sink is not None, turn is not None, triton.next_power_of_2(splits), early).launch(
            (some.stop - begin, heads),
            partial, partial_lse, partial_lse if sink is None else sink.contiguous(),
            *Turn.arguments(turn, some, partial_lse), out[some], lse[some], heads, splits,
        )  # fmt: skip


def scratch(rows: int, splits: int, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results and their log-sum-exps, from torch's allocator at every call: streams and graphs never share them."""
    partial = torch.empty(rows, splits, heads, VALUE_DIM, dtype=torch.float32, device=device)
    return partial, torch.empty(rows, splits, heads, dtype=torch.float32, device=device)


def sparse_mla_rejects(
    q, cache, indices, lengths, sink, extra_cache, extra_indices, extra_lengths, scale, deterministic,
    positions=None, inverse_frequencies=None,
) -> str | None:  # fmt: skip
    """Why these arguments are not for the kernels, or None."""
    if reason := rejects_turn(inverse_frequencies):
        return reason
    if q.dtype != torch.bfloat16:
        return f"q of {q.dtype}, their products are of bfloat16"
    reason = tile.rejects_cache("cache", cache)
    if reason or extra_cache is None:
        return reason
    if layout_of(extra_cache) is not layout_of(cache):
        return f"caches of two layouts, {layout_of(cache).NAME} and {layout_of(extra_cache).NAME}"
    return tile.rejects_cache("extra cache", extra_cache)


def rejects_turn(inverse_frequencies: torch.Tensor | None) -> str | None:
    """Why the kernels cannot turn results back by these, or None."""
    if inverse_frequencies is None or inverse_frequencies.numel() == ROPE_PAIRS:
        return None
    return f"{inverse_frequencies.numel()} inverse frequencies, they turn back {ROPE_PAIRS} pairs of channels"


def check_lists(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None) -> None:
    """With THALWEG_CHECK=1 raises IndexError for a listed slot that is not in the pool; reads the device."""
    if not debug_checks():
        return
    active = indices != -1
    if lengths is not None:
        active &= torch.arange(indices.shape[1], device=indices.device) < lengths.unsqueeze(1)
    in_pool("indices", indices, active, cache.shape[0] * cache.shape[1])


_SCALARS = ("heads", "head_tiles", "width", "pool", "page", "extra_width", "extra_pool", "extra_page")
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
    rotate: bool = False,
    overlap: bool = False,
) -> KernelVariant:
    """The attention kernel."""
    pointers = {"q": "*bf16", "sink": "*fp32"} | turn_pointers(rotate)
    pointers |= {"out": "*fp32" if split else "*bf16", "lse": "*fp32"}
    for prefix in ("", "extra_"):
        pointers |= {prefix + "cache": tile.pointer(layout), prefix + "indices": "*i32", prefix + "lengths": "*i32"}
    integers = dict.fromkeys(_SCALARS, "i32") | dict.fromkeys(_STRIDES, "i64")
    flags = {
        "LENGTHS": lengths,
        "EXTRA_LENGTHS": extra_lengths,
        "SINK": sink,
        "SPLIT": split,
        "ROTATE": rotate,
        "OVERLAP": overlap,
    }
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
        overlaps=overlap,
        representative=sink and split != rotate and not lengths and not extra_lengths and (split or layout == v4.NAME),
        matrix=True,
    )  # fmt: skip


@functools.cache
def reduce_variant(sink: bool, rotate: bool, splits: int, overlap: bool = False) -> KernelVariant:
    """The kernel that merges up to `splits` splits, a power of two."""
    return KernelVariant(
        name=f"sparse_mla/reduce/splits{splits}/{'sink' if sink else 'plain'}"
        + ("+rotate" if rotate else "")
        + ("+overlap" if overlap else ""),
        kernel=reduce_kernel,
        signature=dict.fromkeys(("partial", "partial_lse", "sink"), "*fp32")
        | turn_pointers(rotate)
        | {"out": "*bf16", "lse": "*fp32", "heads": "i32", "splits": "i32"},
        constexprs={"SINK": sink, "ROTATE": rotate, "OVERLAP": overlap, "SPLITS": splits, "GROUP": min(GROUP, splits)},
        divisible_by_16=("partial", "partial_lse", "sink", "positions", "frequencies", "out", "lse"),
        max_registers=128 if rotate else None,  # left alone, the assembler aims at 32 for two splits, and spills
        overlaps=overlap,
        representative=sink and splits == choices.MOST_SPLITS,
    )


@functools.cache
def rotate_variant() -> KernelVariant:
    """The kernel that turns back what is written."""
    return KernelVariant(
        name="sparse_mla/rotate",
        kernel=rotate_kernel,
        signature={"out": "*bf16"} | turn_pointers(True) | {"heads": "i32"},
        constexprs={},
        divisible_by_16=("out", "positions", "frequencies"),
        num_warps=1,
        representative=True,
    )


def turn_pointers(rotate: bool) -> dict[str, str]:
    """The parameters of `Turn.arguments`."""
    return {"positions": "*i32" if rotate else "*fp32", "frequencies": "*fp32"}


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every configuration that the operation can choose."""
    switches = (False, True)
    yield rotate_variant()
    for sink, rotate in itertools.product(switches, repeat=2):
        splits = 2
        while splits <= choices.MOST_SPLITS:
            for overlap in {False, can_overlap(hardware)}:
                yield reduce_variant(sink, rotate, splits, overlap)
            splits *= 2
    for layout in tile.LAYOUTS:
        for choice in choices.all_choices(hardware, layout):
            for flags in itertools.product(switches, repeat=4):
                yield attend_variant(choice, layout, hardware.e4m3_to_f16, *flags, overlap=can_overlap(hardware))
                if layout == v4.NAME and not flags[-1]:
                    yield attend_variant(
                        choice, layout, hardware.e4m3_to_f16, *flags, rotate=True, overlap=can_overlap(hardware)
                    )
