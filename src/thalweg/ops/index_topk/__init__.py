"""The lightning indexer in one operation: scores over the paged keys, exact selection, translation to cache slots."""

import torch
from torch import Tensor

from thalweg.ops import dispatch
from thalweg.ops.checks import require
from thalweg.ops.cuda import hopper_unsupported
from thalweg.ops.hardware import on_first_call, triton_avoided, triton_unsupported
from thalweg.ops.index_topk import reference
from thalweg.ops.mqa_logits import check_index_arguments

_KERNELS = "thalweg.ops.index_topk.triton"
_HOPPER = "thalweg.ops.index_topk.hopper"

# Preferred where it runs: CUDA C++ for one architecture.
dispatch.register(
    "index_topk",
    "hopper",
    on_first_call(_HOPPER, "index_topk"),
    hopper_unsupported,
    rejects=on_first_call(_HOPPER, "rejects"),
)
for _name in ("triton", "triton_f16"):
    dispatch.register(
        "index_topk",
        _name,
        on_first_call(_KERNELS, "index_topk" if _name == "triton" else "index_topk_f16"),
        triton_unsupported,
        triton_avoided,
        on_first_call(_KERNELS, "rejects"),
    )
dispatch.register("index_topk", "reference", reference.index_topk)


def index_topk(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
    row_to_request: torch.Tensor | None = None,
    page_slots: int | None = None,
    *,
    deterministic: bool = False,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest-scoring cache entries of every row: min(k, length) of them, the rest -1.

    Arguments as `thalweg.ops.mqa_logits`; rows of one request are adjacent. k >= 1; page_slots: slots a page of the cache
    that the slots are for, whose pages have the same ids (default, and least: the index cache's keys a page). Returns
    (indices int32 [R, k], slots int32 [R, k]), unordered; equal scores: any, or with deterministic=True the lower index
    first. The slot of an entry whose page is not in the pool is -1. No buffer grows with the table's width. Raises
    ValueError for shapes that do not fit.
    """
    check_index_arguments(q, cache, weights, lengths, page_table, row_to_request)
    require(k >= 1, f"k: got {k}, needs at least 1")
    page_slots = cache.shape[1] if page_slots is None else page_slots
    require(
        page_slots >= cache.shape[1],
        f"page_slots: got {page_slots}, needs at least the {cache.shape[1]} keys of an index page",
    )
    args = (q, cache, weights, lengths, page_table, k, row_to_request, page_slots, deterministic)
    return _index_topk(*args, implementation)


@torch.library.custom_op("thalweg::index_topk", mutates_args=())
def _index_topk(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    k: int,
    row_to_request: Tensor | None,
    page_slots: int,
    deterministic: bool,
    implementation: str | None,
) -> tuple[Tensor, Tensor]:
    args = (q, cache, weights, lengths, page_table, k, row_to_request, page_slots, deterministic)
    return dispatch.run("index_topk", implementation, q.device, *args)


@_index_topk.register_fake
def _(q, cache, weights, lengths, page_table, k, row_to_request, page_slots, deterministic, implementation):
    indices = lengths.new_empty((q.shape[0], k), dtype=torch.int32)
    return indices, torch.empty_like(indices)
