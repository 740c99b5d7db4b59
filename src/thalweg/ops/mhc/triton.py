"""Hyper-connections in Triton: launches, and the variants there are. The kernels: mix.py, then finish.py.

fn is float32 and its product runs on tensor cores: it is split into three bfloat16, which the streams, bfloat16 as they are
stored, meet in three products with float32 sums. Every term is exact to 2^-24; what differs from float32 torch is the order of
the sums. Float32 streams are split as well, in six products. The largest error of F X relative to |F_i||X|, 64 rows of 4 x 4096
normal numbers, sums in float32 (emulated on a CPU; tensor cores truncate where they add): 4e-9; float32 torch 9e-9, two
bfloat16 6e-8, tf32 5e-6, one bfloat16 5e-5. The sums of a row have one order for a number of rows: the same call gives the same
bits again, another number of rows may give others in the last places.
"""

import functools
import itertools
from collections.abc import Iterable

import torch

from thalweg.ops import hardware
from thalweg.ops.mhc import choice as choices
from thalweg.ops.mhc.finish import finish_kernel
from thalweg.ops.mhc.mix import mix_kernel
from thalweg.ops.variants import KernelVariant, packed

STREAMS = 4
_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_OUTPUTS = {False: 24, True: 4}  # columns of fn; of the head


def pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.mhc_pre`."""
    streams = packed(streams)
    partial = _mix(None, streams, fn)
    return _finish(streams, partial, scale, base, None, norm_eps, hc_eps, iterations)


def post(y: torch.Tensor, streams: torch.Tensor, post_weight: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """See `thalweg.ops.mhc_post`."""
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    _mix((y, post_weight, comb, out), packed(streams), None)
    return out


def post_pre_norm(
    y: torch.Tensor,
    streams: torch.Tensor,
    post_weight: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.mhc_post_pre_norm`."""
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    partial = _mix((y, post_weight, comb, out), packed(streams), fn)
    u, next_post, next_comb = _finish(out, partial, scale, base, norm_weight, norm_eps, hc_eps, iterations)
    return out, u, next_post, next_comb


def head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, hc_eps: float
) -> torch.Tensor:
    """See `thalweg.ops.mhc_head`."""
    streams = packed(streams)
    return _finish(streams, _mix(None, streams, fn), scale, base, None, norm_eps, hc_eps, 0)[0]


def _mix(
    behind: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    streams: torch.Tensor,
    fn: torch.Tensor | None,
) -> torch.Tensor:
    """The first launch: behind = (y, post, comb, out) writes out; fn gives the partial products [splits, rows, columns]."""
    rows, _, width = streams.shape
    cores = hardware.multiprocessors(streams.device)
    chosen = choices.choose(rows, streams.element_size(), cores)
    share = choices.share_of(chosen, rows, width, cores)
    splits = -(-width // share)
    if behind is None:
        y = post_weight = comb = out = streams
    else:
        y, post_weight, comb = packed(behind[0]), behind[1].float().contiguous(), behind[2].float().contiguous()
        out = behind[3]
    is_head = fn is not None and fn.shape[0] == _OUTPUTS[True]
    variant = mix_variant(chosen, streams.dtype, behind is not None, fn is not None, is_head)
    if fn is None:
        fn = partial = streams
    else:
        fn = packed(fn)
        columns = variant.constexprs["COLUMNS"]
        partial = torch.empty(splits, rows, columns, dtype=torch.float32, device=streams.device)
    if rows and width:
        variant.launch(
            (-(-rows // chosen.rows), splits),
            streams, y, post_weight, comb, fn, out, partial,
            rows, width, share, streams.stride(0), streams.stride(1), y.stride(0), fn.stride(0),
        )  # fmt: skip
    return partial


def _finish(
    streams: torch.Tensor,
    partial: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The second launch: (u, post, comb); iterations = 0 is the head, whose post and comb are empty."""
    rows, _, width = streams.shape
    is_head = iterations == 0
    chosen = choices.choose(rows, streams.element_size(), hardware.multiprocessors(streams.device))
    u = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    some = 0 if is_head else rows
    post_weight = torch.empty(some, STREAMS, dtype=torch.float32, device=streams.device)
    comb = torch.empty(some, STREAMS, STREAMS, dtype=torch.float32, device=streams.device)
    if rows and width:
        mixing = -(-some // chosen.mixers)
        norm = None if norm_weight is None else norm_weight.dtype
        at_once = choices.width_of(width)
        variant = finish_variant(
            (chosen.splits, chosen.mixers), at_once, width <= at_once, streams.dtype, norm, is_head
        )
        variant.launch(
            (mixing + rows,),
            streams, partial, scale.contiguous(), base.contiguous(),
            u if norm_weight is None else norm_weight.contiguous(), u, post_weight, comb,
            rows, width, partial.shape[0], iterations, mixing, streams.stride(0), streams.stride(1), norm_eps, hc_eps,
        )  # fmt: skip
    return u, post_weight, comb


def pre_rejects(streams, fn, scale, base, norm_eps, hc_eps, iterations) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    return _rejects(streams)


def post_rejects(y, streams, post_weight, comb) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    return _rejects(streams, y)


def post_pre_norm_rejects(
    y, streams, post_weight, comb, fn, scale, base, norm_weight, norm_eps, hc_eps, iterations
) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    if norm_weight.dtype not in _POINTERS:
        return f"norm_weight of {norm_weight.dtype}, they read bfloat16 and float32"
    return _rejects(streams, y)


def head_rejects(streams, fn, scale, base, norm_eps, hc_eps) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    return _rejects(streams)


def _rejects(streams: torch.Tensor, y: torch.Tensor | None = None) -> str | None:
    if streams.shape[1] != STREAMS:
        return f"{streams.shape[1]} streams, they have {STREAMS}"
    if streams.dtype not in _POINTERS:
        return f"streams of {streams.dtype}, they read bfloat16 and float32"
    if y is not None and y.dtype != streams.dtype:
        return f"y of {y.dtype} with streams of {streams.dtype}"
    return None


@functools.cache
def mix_variant(choice: choices.Choice, dtype: torch.dtype, post: bool, mix: bool, head: bool) -> KernelVariant:
    """The first launch: with `post` it mixes streams, with `mix` it multiplies them by fn, the head's where `head`."""
    kind = _POINTERS[dtype]
    pointers = dict.fromkeys(("streams", "y"), kind)
    pointers |= dict.fromkeys(("post", "comb"), "*fp32" if post else kind) | {"fn": "*fp32" if mix else kind}
    pointers |= {"out": kind, "partial": "*fp32" if mix else kind}
    strides = ("stream_row", "stream", "y_row", "fn_row")
    parts = [name for name, value in {"post": post, "head" if head else "mix": mix}.items() if value]
    return KernelVariant(
        name=f"mhc/{'+'.join(parts)}/{_NAMES[dtype]}/{choice.label()}",
        kernel=mix_kernel,
        signature=pointers | dict.fromkeys(("rows", "width", "share"), "i32") | dict.fromkeys(strides, "i64"),
        constexprs={
            "POST": post,
            "MIX": mix,
            "OUTPUTS": _OUTPUTS[head],
            "COLUMNS": 16 if head else 32,
            "ROWS": choice.rows,
            "BLOCK": choice.block,
        },
        divisible_by_16=(*pointers, "width", "share", *strides),
        num_warps=choice.warps,
        max_registers=255,  # left alone, the assembler aims lower, and spills
        representative=mix and (post or head) and dtype == torch.bfloat16,
        matrix=mix,
    )


@functools.cache
def finish_variant(
    splits_and_mixers: tuple[int, int], width: int, one: bool, dtype: torch.dtype, norm: torch.dtype | None, head: bool
) -> KernelVariant:
    """The second launch: rows of up to `width` channels at once (all of them where `one`), normalised where `norm`."""
    splits, mixers = splits_and_mixers
    warps = choices.warps_of(width, dtype.itemsize)
    kind = _POINTERS[dtype]
    pointers = {"streams": kind, "partial": "*fp32", "scale": "*fp32", "base": "*fp32"}
    pointers |= {"norm": kind if norm is None else _POINTERS[norm], "u": kind, "post": "*fp32", "comb": "*fp32"}
    parts = ["head" if head else "pre"] + ([] if norm is None else [f"norm_{_NAMES[norm]}"])
    shape = f"splits{splits}/mixers{mixers}/width{width}{'' if one else '+'}"
    return KernelVariant(
        name=f"mhc/finish/{'+'.join(parts)}/{_NAMES[dtype]}/{shape}",
        kernel=finish_kernel,
        signature=pointers
        | dict.fromkeys(("rows", "width", "splits", "iterations", "mixing"), "i32")
        | dict.fromkeys(("stream_row", "stream"), "i64")
        | dict.fromkeys(("norm_eps", "hc_eps"), "fp32"),
        constexprs={
            "HEAD": head,
            "NORM": norm is not None,
            "OUTPUTS": _OUTPUTS[head],
            "COLUMNS": 16 if head else 32,
            "SPLITS": splits,
            "MIXERS": mixers,
            "WIDTH": width,
            "ONE": one,
        },
        divisible_by_16=(*pointers, "width", "stream_row", "stream"),
        num_warps=warps,
        max_registers=min(255, 65536 // (32 * warps)),
        representative=dtype == torch.bfloat16
        and (
            (norm == torch.bfloat16 and (width == 4096 or (width == 8192 and splits == choices.MOST_SPLITS)))
            or (head and width == 4096 and splits == choices.MOST_SPLITS)
        ),
    )


def variants(hardware: hardware.Hardware) -> Iterable[KernelVariant]:
    """Every configuration that the operations can choose."""
    for dtype in _POINTERS:
        chosen = choices.all_choices(dtype.itemsize)
        for choice in {each.label(): each for each in chosen}.values():  # some differ in the second launch alone
            yield mix_variant(choice, dtype, False, True, False)
            yield mix_variant(choice, dtype, True, True, False)
            yield mix_variant(choice, dtype, True, False, False)
            yield mix_variant(choice, dtype, False, True, True)
        second = {(choice.splits, choice.mixers): None for choice in chosen}
        for both, width in itertools.product(second, choices.WIDTHS):
            for one in (True, False) if width == choices.WIDTHS[-1] else (True,):
                yield finish_variant(both, width, one, dtype, None, True)
                for norm in (None, *_POINTERS):
                    yield finish_variant(both, width, one, dtype, norm, False)
