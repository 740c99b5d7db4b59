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
    if row_to_request is None:
        row_to_request = torch.arange(q.shape[0], device=q.device)
    for rows, row_lengths, scores in score_requests(q, cache, weights, lengths, page_table, row_to_request):
        indices[rows] = select(scores, row_lengths, k)
    return indices, to_slots(indices, page_table, row_to_request, page_slots)


def to_slots(
    indices: torch.Tensor, page_table: torch.Tensor, row_to_request: torch.Tensor, page_slots: int
) -> torch.Tensor:
    """Entry indices of each row's request to slots of a cache with `page_slots` slots a page; -1 stays -1."""
    entry = indices.clamp(min=0).long()
    page = page_table[row_to_request.long().unsqueeze(1), entry // page_slots]
    slots = page.long() * page_slots + entry % page_slots
    return torch.where((indices >= 0) & (page >= 0), slots, -1).to(torch.int32)
