"""Scores and selection request by request: no buffer is wider than the request is long."""

import torch

from thalweg.ops.mqa_logits.reference import score_requests
from thalweg.ops.topk.reference import select


def index_topk(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
    row_to_request: torch.Tensor | None,
    page_slots: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.index_topk`: always deterministic here."""
    indices = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    slots = torch.full_like(indices, -1)
    for request, rows, row_lengths, scores in score_requests(q, cache, weights, lengths, page_table, row_to_request):
        indices[rows] = select(scores, row_lengths, k)
        slots[rows] = to_slots(indices[rows], page_table[request], cache.shape[0], cache.shape[1], page_slots)
    return indices, slots


def to_slots(
    indices: torch.Tensor, pages: torch.Tensor, pool_pages: int, page_keys: int, page_slots: int
) -> torch.Tensor:
    """Entries of one request to slots of a cache with `page_slots` slots a page; -1, also where the page is in no pool."""
    entry = indices.clamp(min=0).long()
    page = pages[entry // page_keys].long()
    slots = page * page_slots + entry % page_keys
    # Masked before the cast: a page id past the pool could wrap to the slot of somebody else.
    return torch.where((indices >= 0) & (page >= 0) & (page < pool_pages), slots, -1).to(torch.int32)
