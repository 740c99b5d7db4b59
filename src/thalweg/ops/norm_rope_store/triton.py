"""Norm, rope, quantisation and paged store in Triton: launches, and the variants there are. The kernels: store.py and query.py.

Stored bytes are the reference's, but for the sign of a NaN, and for channels that turn where two libraries' cosines differ in
their last bit: it can move a bf16 channel by one step, or the float32 scale of an index key in its last bit. Queries are
float32 inside: their error is one rounding and about 3e-7.
"""

import functools
import itertools
from collections.abc import Iterable

import torch
import triton

from thalweg.layouts.registry import layout_of
from thalweg.ops import hardware
from thalweg.ops.checks import debug_checks, in_pool
from thalweg.ops.device import store as layouts
from thalweg.ops.norm_rope_store.query import index_query_kernel, query_kernel
from thalweg.ops.norm_rope_store.store import store_kernel
from thalweg.ops.variants import FLOAT_NAMES, FLOAT_POINTERS, KernelVariant, packed

_TILE = 4096  # channels of a program of queries
_QUERY_WIDTHS = (128, 512)  # what variants are compiled for: the indexer's and the models' heads; others up to the tile


def kv_store(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
) -> None:
    """See `thalweg.ops.norm_rope_store`."""
    rows, channels = kv.shape
    pool = cache.shape[0] * cache.shape[1]
    if debug_checks():
        in_pool("norm_rope_store slots", slots, slots != -1, pool)
    if rows == 0:
        return
    layout = layout_of(cache).NAME
    elements, kv = layouts.elements(cache), packed(kv)
    first = torch.tensor(eps, dtype=torch.float32).item()
    store_variant(layout, layouts.width_of(layout, channels), kv.dtype, norm_weight.dtype).launch(
        (rows,),
        kv, norm_weight.contiguous(), inverse_frequencies.contiguous(), positions.contiguous(), elements, slots.contiguous(),
        channels, norm_weight.numel(), inverse_frequencies.numel(), pool, cache.shape[1],
        kv.stride(0), elements.stride(0), first, eps - first,
    )  # fmt: skip


def query(q: torch.Tensor, inverse_frequencies: torch.Tensor, positions: torch.Tensor, eps: float) -> torch.Tensor:
    """See `thalweg.ops.norm_rope_q`."""
    q = packed(q)
    rows, heads, channels = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel():
        variant = query_variant(_width(channels), q.dtype)
        variant.launch(
            (rows, -(-heads // variant.constexprs["HEADS"])),
            q, inverse_frequencies.contiguous(), positions.contiguous(), out,
            heads, channels, inverse_frequencies.numel(), q.stride(0), q.stride(1), eps,
        )  # fmt: skip
    return out


def index_query(
    q: torch.Tensor,
    weights: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    positions: torch.Tensor,
    rotate_hadamard: bool,
    quantise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.rope_quantise_index_q`."""
    q, weights = packed(q), packed(weights)
    rows, heads, channels = q.shape
    kind = torch.float8_e4m3fn if quantise else torch.float32
    out = torch.empty(q.shape, dtype=kind, device=q.device)
    folded = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if out.numel():
        variant = index_query_variant(_width(channels), q.dtype, rotate_hadamard, quantise)
        variant.launch(
            (rows, -(-heads // variant.constexprs["HEADS"])),
            q, weights, inverse_frequencies.contiguous(), positions.contiguous(),
            out.view(torch.uint8) if quantise else out, folded,
            heads, channels, inverse_frequencies.numel(), q.stride(0), q.stride(1), weights.stride(0),
        )  # fmt: skip
    return out, folded


def _width(channels: int) -> int:
    return max(_QUERY_WIDTHS[0], triton.next_power_of_2(channels))


def kv_store_rejects(kv, norm_weight, inverse_frequencies, positions, cache, slots, eps) -> str | None:
    """Why these arguments are not for the kernel, or None."""
    reason = layouts.rejects_cache(cache)
    return None if reason is None else f"cache: {reason}"


def query_rejects(q, inverse_frequencies, positions, eps) -> str | None:
    """Why these arguments are not for the kernel, or None."""
    return _rejects(q)


def index_query_rejects(q, weights, inverse_frequencies, positions, rotate_hadamard, quantise) -> str | None:
    """Why these arguments are not for the kernel, or None."""
    if rotate_hadamard and q.shape[2] != _width(q.shape[2]):
        return f"q: a rotation of heads of {q.shape[2]} channels, it has powers of two from {_QUERY_WIDTHS[0]} on"
    return _rejects(q)


def _rejects(q: torch.Tensor) -> str | None:
    if q.shape[2] % 2:
        return f"q: heads of {q.shape[2]} channels, they turn pairs of even and odd ones"
    if q.shape[2] > _TILE:
        return f"q: heads of {q.shape[2]} channels, they hold up to {_TILE}"
    return None


@functools.cache
def store_variant(layout: str, width: int, kv: torch.dtype, norm: torch.dtype) -> KernelVariant:
    """The kernel that stores rows of a layout."""
    pointers = {"kv": FLOAT_POINTERS[kv], "norm": FLOAT_POINTERS[norm], "frequencies": "*fp32", "positions": "*i32"}
    pointers |= {"cache": layouts.POINTERS[layout], "slots": "*i32"}
    return KernelVariant(
        name=f"norm_rope_store/{layout}/width{width}/{FLOAT_NAMES[kv]}/norm_{FLOAT_NAMES[norm]}",
        kernel=store_kernel,
        signature=pointers
        | dict.fromkeys(("channels", "normed", "pairs", "pool", "page_slots"), "i32")
        | dict.fromkeys(("kv_row", "page_stride"), "i64")
        | dict.fromkeys(("eps", "eps_rest"), "fp32"),
        constexprs={"LAYOUT": layout, "WIDTH": width},
        divisible_by_16=(*pointers, "channels", "normed", "pairs", "kv_row", "page_stride"),
        num_warps=max(1, width // 256),
        representative=kv == norm == torch.bfloat16 and (layout != "exact" or width == 512),
    )


@functools.cache
def query_variant(width: int, dtype: torch.dtype) -> KernelVariant:
    """The kernel for queries of up to `width` channels a head."""
    kind = FLOAT_POINTERS[dtype]
    pointers = {"q": kind, "frequencies": "*fp32", "positions": "*i32", "out": kind}
    return KernelVariant(
        name=f"norm_rope_store/q/width{width}/{FLOAT_NAMES[dtype]}",
        kernel=query_kernel,
        signature=pointers
        | dict.fromkeys(("heads", "channels", "pairs"), "i32")
        | dict.fromkeys(("q_row", "q_head"), "i64")
        | {"eps": "fp32"},
        constexprs={"HEADS": _TILE // width, "WIDTH": width},
        divisible_by_16=(*pointers, "channels", "pairs", "q_row", "q_head"),
        representative=dtype == torch.bfloat16 and width == 512,
    )


@functools.cache
def index_query_variant(width: int, dtype: torch.dtype, rotate_hadamard: bool, quantise: bool) -> KernelVariant:
    """The kernel for the indexer's queries."""
    pointers = {"q": FLOAT_POINTERS[dtype], "weights": "*fp32", "frequencies": "*fp32", "positions": "*i32"}
    pointers |= {"out": "*u8" if quantise else "*fp32", "folded": "*fp32"}
    parts = ["hadamard"] * rotate_hadamard + ["e4m3" if quantise else "plain"]
    return KernelVariant(
        name=f"norm_rope_store/index_q/width{width}/{FLOAT_NAMES[dtype]}/{'+'.join(parts)}",
        kernel=index_query_kernel,
        signature=pointers
        | dict.fromkeys(("heads", "channels", "pairs"), "i32")
        | dict.fromkeys(("q_row", "q_head", "weights_row"), "i64"),
        constexprs={
            "HADAMARD": rotate_hadamard,
            "QUANTISE": quantise,
            "HEADS": _TILE // width // 2,
            "WIDTH": width,
            "LOG2": width.bit_length() - 1,
        },
        divisible_by_16=(*pointers, "channels", "pairs", "q_row", "q_head", "weights_row"),
        representative=dtype == torch.bfloat16 and width == 128 and quantise,
    )


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every configuration that the operations can choose for the models' widths."""
    for kv, norm in itertools.product(FLOAT_POINTERS, repeat=2):
        for layout in layouts.WIDTHS:
            yield store_variant(layout, layouts.WIDTHS[layout], kv, norm)
        for width in layouts.EXACT_WIDTHS:
            yield store_variant("exact", width, kv, norm)
    for width, dtype in itertools.product(_QUERY_WIDTHS, FLOAT_POINTERS):
        yield query_variant(width, dtype)
        for rotate_hadamard, quantise in itertools.product((True, False), repeat=2):
            yield index_query_variant(width, dtype, rotate_hadamard, quantise)
