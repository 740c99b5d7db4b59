"""Latent attention over index lists: one or two caches in one joint softmax, any head count, any width.

s_j = q . k_j x scale; out_h = sum_j e^{s_j} v_j / (sum_j e^{s_j} + e^{sink_h}); v is the first 512 channels of k.
Source: the DeepSeek-V3.2 and V4 technical reports.
"""

import torch
from torch import Tensor

from thalweg.layouts.registry import layout_of
from thalweg.ops import dispatch
from thalweg.ops.checks import FLOATING, check_inverse_frequencies, check_same_device, check_tensor, require
from thalweg.ops.cuda import hopper_unsupported
from thalweg.ops.hardware import on_first_call, triton_avoided, triton_unsupported
from thalweg.ops.sparse_mla import reference

_KERNELS = "thalweg.ops.sparse_mla.triton"
_HOPPER = "thalweg.ops.sparse_mla.hopper"

dispatch.register(
    "sparse_mla",
    "hopper",
    on_first_call(_HOPPER, "sparse_mla"),
    hopper_unsupported,
    rejects=on_first_call(_HOPPER, "rejects"),
)
dispatch.register(
    "sparse_mla",
    "triton",
    on_first_call(_KERNELS, "sparse_mla"),
    triton_unsupported,
    triton_avoided,
    on_first_call(_KERNELS, "sparse_mla_rejects"),
)
dispatch.register("sparse_mla", "reference", reference.sparse_mla)

_INTEGER = (torch.int32, torch.int64)


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    extra: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
    *,
    scale: float,
    rotate_back: tuple[torch.Tensor, torch.Tensor] | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass over the listed slots of one or two caches.

    q [R, H, 512 or 576] bf16, float16 or float32, the row width of the caches; cache v4, v32, mla_bf16 or exact; indices
    int [R, K] slots, -1 = none, anywhere in the list; lengths int [R] or None: entries from lengths[r] on are not read; sink
    float32 [H] or None, applied once; extra = (cache, indices, lengths or None) for a second cache. Returns (out [R, H, 512]
    in q's dtype, lse float32 [R, H]: natural log, sink excluded). A row that attends to nothing gives out 0 and lse -inf. An
    index outside the pool raises IndexError with THALWEG_CHECK=1 and is masked otherwise. rotate_back = (positions int [R],
    inverse_frequencies float32 [n]) turns the last 2n channels of out back by each row's position (`ops.rotary.rotate` with
    inverse=True), before out is rounded: for caches whose values are whole rows of 512, rope channels included (v4, exact).
    deterministic: a row has the same bits at any batch size (the reference always gives them). Raises ValueError for shapes
    that do not fit.
    """
    check_tensor("q", q, (None, None, None), FLOATING)
    rows, heads, width = q.shape
    require(heads >= 1, "q: needs at least one head")
    _check_list("indices", cache, indices, lengths, rows, width)
    if sink is not None:
        check_tensor("sink", sink, (heads,), (torch.float32,))
    if extra is not None:
        _check_list("extra indices", *extra, rows, width)
    extra_cache, extra_indices, extra_lengths = extra or (None, None, None)
    positions, frequencies = rotate_back or (None, None)
    if rotate_back is not None:
        if positions is None or frequencies is None:
            raise ValueError(
                "rotate_back: got None in it, needs positions and inverse_frequencies, or None for the whole"
            )
        require(width == reference.VALUE_DIM, f"rotate_back: rows of {width}, whose values lack the rope channels")
        check_tensor("positions", positions, (rows,), _INTEGER)
        check_inverse_frequencies(frequencies, width)
    one = {"q": q, "cache": cache, "indices": indices, "lengths": lengths, "sink": sink}
    two = {"extra cache": extra_cache, "extra indices": extra_indices, "extra lengths": extra_lengths}
    check_same_device(**one, **two, positions=positions, inverse_frequencies=frequencies)
    args = (q, cache, indices, lengths, sink, extra_cache, extra_indices, extra_lengths, scale, deterministic)
    return _sparse_mla(*args, positions, frequencies, implementation)


def _check_list(
    name: str, cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, rows: int, width: int
) -> None:
    layout = layout_of(cache)
    stored = getattr(layout, "WIDTH", cache.shape[-1])
    require(stored == width, f"{name}: q has width {width}, the {layout.NAME} cache has rows of {stored}")
    require(stored >= reference.VALUE_DIM, f"{name}: values are 512 channels, the {layout.NAME} cache has {stored}")
    check_tensor(name, indices, (rows, None), _INTEGER)
    if lengths is not None:
        check_tensor(f"{name} lengths", lengths, (rows,), _INTEGER)


@torch.library.custom_op("thalweg::sparse_mla", mutates_args=())
def _sparse_mla(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    sink: Tensor | None,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    scale: float,
    deterministic: bool,
    positions: Tensor | None,
    inverse_frequencies: Tensor | None,
    implementation: str | None,
) -> tuple[Tensor, Tensor]:
    lists = (cache, indices, lengths, sink, extra_cache, extra_indices, extra_lengths)
    args = (q, *lists, scale, deterministic, positions, inverse_frequencies)
    return dispatch.run("sparse_mla", implementation, q.device, *args)


@_sparse_mla.register_fake
def _(q, *args):
    rows, heads = q.shape[:2]
    return q.new_empty((rows, heads, reference.VALUE_DIM)), q.new_empty((rows, heads), dtype=torch.float32)
