"""The lightning indexer in one operation: scores over the paged keys, exact selection, translation to cache slots."""

import torch
from torch import Tensor

from thalweg.ops import dispatch
from thalweg.ops.checks import require
from thalweg.ops.index_topk import reference
from thalweg.ops.mqa_logits import check_index_arguments

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
    that the slots are for (default: as many as the index cache has keys a page), through the same page table. Returns
    (indices int32 [R, k], slots int32 [R, k]), unordered; equal scores: any, or with deterministic=True the lower index
    first. No buffer grows with the table's width. Raises ValueError for shapes that do not fit.
    """
    check_index_arguments(q, cache, weights, lengths, page_table, row_to_request)
    require(k >= 1, f"k: got {k}, needs at least 1")
    page_slots = cache.shape[1] if page_slots is None else page_slots
    require(page_slots >= 1, f"page_slots: got {page_slots}, needs at least 1")
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
