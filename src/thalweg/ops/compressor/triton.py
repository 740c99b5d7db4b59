"""The compressors in Triton: the launch, and the variants there are. The kernel: pool.py.

Pooling is float32, with an error of about 3e-7 of a channel's largest value; an entry is rounded to bf16 before it is
quantised, so that now and then a value differs from the reference's by one step of bf16. A row's bits depend neither on other
rows nor on how a prompt is cut into calls.
"""

import functools
import itertools
from collections.abc import Iterable

import torch

from thalweg.layouts.registry import layout_of
from thalweg.ops import hardware
from thalweg.ops.checks import debug_checks, in_pool
from thalweg.ops.compressor.plan import CompressPlan, overlap_of
from thalweg.ops.compressor.pool import compress_kernel
from thalweg.ops.device import store as layouts
from thalweg.ops.variants import FLOAT_NAMES, FLOAT_POINTERS, KernelVariant, packed

_MOST = 1024  # channels of an entry
_SLOTS = {4: 8, 128: 16}  # rows of the window that a program reads at once, by ratio; 8 of wide ones
_SCAN = 1024  # rows whose owners are read at once


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    state: torch.Tensor,
    ape: torch.Tensor,
    plan: CompressPlan,
    norm_weight: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    cache: torch.Tensor,
    ratio: int,
    rotate_hadamard: bool,
    eps: float,
) -> None:
    """See `thalweg.ops.compress`. The positions of a request's rows follow each other without a gap."""
    pool = cache.shape[0] * cache.shape[1]
    if debug_checks():
        _check(plan, ratio, state.shape[0], pool)
    rows, width = kv.shape
    if rows == 0:
        return
    d = norm_weight.numel()
    layout = layout_of(cache).NAME
    elements, kv, gate = layouts.elements(cache), packed(kv), packed(gate)
    first = torch.tensor(eps, dtype=torch.float32).item()
    variant = compress_variant(layout, layouts.width_of(layout, d), ratio, rotate_hadamard, kv.dtype, norm_weight.dtype)
    variant.launch(
        (rows,),
        kv, gate, state, ape.contiguous(),
        plan.positions.contiguous(), plan.state_slots.contiguous(), plan.cache_slots.contiguous(),
        norm_weight.contiguous(), inverse_frequencies.contiguous(), elements,
        rows, width, d, inverse_frequencies.numel(), state.shape[0], pool, cache.shape[1],
        kv.stride(0), gate.stride(0), state.stride(0), state.stride(1), state.stride(2), elements.stride(0),
        first, eps - first,
    )  # fmt: skip


def _check(plan: CompressPlan, ratio: int, states: int, pool: int) -> None:
    """Raises IndexError for a slot outside its pool, or a gap between the positions of a request's rows; reads the device."""
    positions, slots = plan.positions.long(), plan.state_slots.long()
    real = in_pool("compress state_slots", slots, slots != -1, states)
    in_pool("compress cache_slots", plan.cache_slots, real & (positions % ratio == ratio - 1), pool)
    gaps = real[1:] & (slots[1:] == slots[:-1]) & (positions[1:] != positions[:-1] + 1)
    if bool(gaps.any()):
        row = int(gaps.nonzero()[0]) + 1
        raise IndexError(f"compress positions: row {row} does not follow the row before it of the same request")


def compress_rejects(
    kv, gate, state, ape, plan, norm_weight, inverse_frequencies, cache, ratio, rotate_hadamard, eps
) -> str | None:
    """Why these arguments are not for the kernel, or None."""
    d = norm_weight.numel()
    if gate.dtype != kv.dtype:
        return f"gate of {gate.dtype} with kv of {kv.dtype}"
    if ape.dtype != torch.float32:
        return f"ape of {ape.dtype}, they read float32"
    if state.stride(3) != 1:
        return f"state: channels {state.stride(3)} elements apart, they write them side by side"
    if d > _MOST:
        return f"entries of {d} channels, they hold up to {_MOST}"
    if rotate_hadamard and d != layouts.width_of(layout_of(cache).NAME, d):
        return f"a rotation of entries of {d} channels, it has powers of two from 128 on"
    reason = layouts.rejects_cache(cache)
    return None if reason is None else f"cache: {reason}"


@functools.cache
def compress_variant(
    layout: str, width: int, ratio: int, rotate_hadamard: bool, kv: torch.dtype, norm: torch.dtype
) -> KernelVariant:
    """The kernel for entries of up to `width` channels."""
    pointers = dict.fromkeys(("kv", "gate"), FLOAT_POINTERS[kv]) | dict.fromkeys(("state", "ape"), "*fp32")
    pointers |= dict.fromkeys(("positions", "state_slots", "cache_slots"), "*i32")
    pointers |= {"norm": FLOAT_POINTERS[norm], "frequencies": "*fp32", "cache": layouts.POINTERS[layout]}
    strides = ("kv_row", "gate_row", "state_row", "ring_row", "ring_gate", "page_stride")
    ring = overlap_of(ratio)
    warps = (
        (8 if ratio == 4 else 16) if width >= 512 else 4
    )  # a c128 entry is 512 KB for one program: many loads at once
    how = f"c{ratio}" + ("+hadamard" if rotate_hadamard else "")
    return KernelVariant(
        name=f"compressor/{how}/{layout}/width{width}/{FLOAT_NAMES[kv]}/norm_{FLOAT_NAMES[norm]}",
        kernel=compress_kernel,
        signature=pointers
        | dict.fromkeys(("rows", "width", "d", "pairs", "states", "pool", "page_slots"), "i32")
        | dict.fromkeys(strides, "i64")
        | dict.fromkeys(("eps", "eps_rest"), "fp32"),
        constexprs={
            "LAYOUT": layout,
            "RATIO": ratio,
            "RING": ring,
            "HADAMARD": rotate_hadamard,
            "SLOTS": _SLOTS[ratio] if width <= 512 else 8,
            "WIDTH": width,
            "LOG2": width.bit_length() - 1,
            "COLUMNS": 2 * width if ratio == 4 else width,
            "SCAN": _SCAN,
        },
        divisible_by_16=(*pointers, "width", "d", "pairs", *strides),
        num_warps=warps,
        max_registers=min(255, 65536 // (32 * warps)),  # left alone, the assembler aims lower, and spills
        representative=kv == torch.float32
        and norm == torch.bfloat16
        and ((layout == "v4" and not rotate_hadamard) or (layout == "index_fp8" and ratio == 4)),
    )


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every configuration that the operation can choose for the layouts' widths."""
    widths = [(layout, width) for layout, width in layouts.WIDTHS.items()]
    widths += [("exact", width) for width in layouts.EXACT_WIDTHS]
    for (layout, width), ratio in itertools.product(widths, (4, 128)):
        for kv, norm in itertools.product(FLOAT_POINTERS, repeat=2):
            yield compress_variant(layout, width, ratio, False, kv, norm)
            if layout not in ("v32", "mla_bf16"):  # rows of 576 channels have no rotation
                yield compress_variant(layout, width, ratio, True, kv, norm)
