"""Exact top-k in plain PyTorch: a stable sort, so equal scores come lower index first."""

import torch


def topk(logits: torch.Tensor, lengths: torch.Tensor, k: int, ordered: bool, deterministic: bool) -> torch.Tensor:
    """See `thalweg.ops.topk`: always ordered and deterministic here."""
    longest = int(lengths.max()) if lengths.numel() else 0
    return select(logits[:, : max(longest, 0)], lengths, k)


def select(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [R, k]: the k highest of scores[r, :lengths[r]], highest first, then -1. Columns past a length may hold anything."""
    rows, width = scores.shape
    out = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    if width == 0:
        return out
    column = torch.arange(width, device=scores.device)
    # Dead columns go last: -inf ties with a live -inf, and the stable sort keeps the live (lower) one first.
    masked = torch.where(column < lengths.unsqueeze(1), scores, float("-inf"))
    order = torch.sort(masked, dim=1, descending=True, stable=True).indices[:, :k].int()
    rank = torch.arange(order.shape[1], device=scores.device)
    out[:, : order.shape[1]] = torch.where(rank < lengths.unsqueeze(1), order, -1)
    return out
