"""Latent attention over index lists: one or two caches in one joint softmax, any head count, any width.

s_j = q . k_j x scale; out_h = sum_j e^{s_j} v_j / (sum_j e^{s_j} + e^{sink_h}); v is the first 512 channels of k.
Source: the DeepSeek-V3.2 and V4 technical reports.
"""

import torch
from torch import Tensor

from thalweg.layouts.registry import layout_of
from thalweg.ops import dispatch
from thalweg.ops.checks import check_same_device, check_tensor, require
from thalweg.ops.sparse_mla import reference

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
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass over the listed slots of one or two caches.

    q [R, H, 512 or 576] bf16 or float32, the row width of the caches; cache v4, v32, mla_bf16 or exact; indices int [R, K]
    slots, -1 = none, anywhere in the list; lengths int [R] or None: entries from lengths[r] on are not read; sink float32 [H]
    or None, applied once; extra = (cache, indices, lengths or None) for a second cache. Returns (out [R, H, 512] in q's dtype,
    lse float32 [R, H]: natural log, sink excluded). A row that attends to nothing gives out 0 and lse -inf. An index outside
    the pool raises with THALWEG_CHECK=1 and is masked otherwise. Raises ValueError for shapes that do not fit.
    """
    check_tensor("q", q, (None, None, None), (torch.bfloat16, torch.float32, torch.float16))
    rows, heads, width = q.shape
    require(heads >= 1, "q: needs at least one head")
    _check_list("indices", cache, indices, lengths, rows, width)
    if sink is not None:
        check_tensor("sink", sink, (heads,), (torch.float32,))
    extra_cache, extra_indices, extra_lengths = extra if extra is not None else (None, None, None)
    if extra_cache is not None and extra_indices is not None:
        _check_list("extra indices", extra_cache, extra_indices, extra_lengths, rows, width)
    check_same_device(q=q, cache=cache, indices=indices, lengths=lengths, sink=sink, extra_cache=extra_cache)
    args = (q, cache, indices, lengths, sink, extra_cache, extra_indices, extra_lengths, scale)
    return _sparse_mla(*args, implementation)


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
    implementation: str | None,
) -> tuple[Tensor, Tensor]:
    args = (q, cache, indices, lengths, sink, extra_cache, extra_indices, extra_lengths, scale)
    return dispatch.run("sparse_mla", implementation, q.device, *args)


@_sparse_mla.register_fake
def _(q, cache, indices, lengths, sink, extra_cache, extra_indices, extra_lengths, scale, implementation):
    rows, heads = q.shape[:2]
    return q.new_empty((rows, heads, reference.VALUE_DIM)), q.new_empty((rows, heads), dtype=torch.float32)
