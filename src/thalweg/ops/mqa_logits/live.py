"""THALWEG_CHECK=1 for kernels, which mask what is outside a pool: looks at the live part of a batch beforehand."""

import torch

from thalweg.ops.checks import debug_checks, in_pool


def check_live(
    pool: int, page_keys: int, lengths: torch.Tensor, page_table: torch.Tensor, row_to_request: torch.Tensor | None
) -> None:
    """With THALWEG_CHECK=1 raises IndexError for a live row, length or page outside its pool; reads the device."""
    if not debug_checks():
        return
    requests, width = page_table.shape
    if row_to_request is None:
        row_to_request = torch.arange(lengths.numel(), device=lengths.device)
    live = in_pool("row_to_request", row_to_request, lengths > 0, requests)
    in_pool("lengths (last live entry)", lengths - 1, live, width * page_keys)
    longest = torch.zeros(requests, dtype=torch.int64, device=lengths.device)
    longest.scatter_reduce_(0, row_to_request[live].long(), lengths[live].long(), "amax")
    pages = torch.arange(width, device=lengths.device) * page_keys < longest.unsqueeze(1)
    in_pool("page_table", page_table, pages, pool)


def check_ragged(starts: torch.Tensor, ends: torch.Tensor, keys: int) -> None:
    """With THALWEG_CHECK=1 raises IndexError for a live row that reaches outside the keys; reads the device."""
    if debug_checks():
        live = ends > starts
        in_pool("starts", starts, live, keys)
        in_pool("ends (last live key)", ends - 1, live, keys)
