"""Attention over index lists in plain PyTorch, float64 inside: every slot named is decoded once, then gathered."""

import torch

from thalweg.layouts.registry import layout_of
from thalweg.layouts.work import Work, count, is_counting
from thalweg.ops.checks import in_pool
from thalweg.ops.rotary import rotate

VALUE_DIM = 512

# Elements of the gathered float64 key block: 4 MiB, which stays in a CPU's cache.
_BLOCK_ELEMENTS = 2**19


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_lengths: torch.Tensor | None,
    scale: float,
    deterministic: bool,
    positions: torch.Tensor | None = None,
    inverse_frequencies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.sparse_mla`."""
    keys, where = _named_rows(cache, indices, lengths, 0)
    if extra_cache is not None and extra_indices is not None:
        extra_keys, extra_where = _named_rows(extra_cache, extra_indices, extra_lengths, keys.shape[0])
        keys, where = torch.cat((keys, extra_keys)), torch.cat((where, extra_where), dim=1)
    out = torch.empty(*q.shape[:2], VALUE_DIM, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    # Entries that are not attended gather a row of zeros: not a product with a mask, 0 x NaN is NaN.
    keys = torch.cat((keys, keys.new_zeros(1, keys.shape[1])))
    if is_counting():
        count(Work(entries_attended=int((where >= 0).sum())))
    block = max(1, _BLOCK_ELEMENTS // max(1, where.shape[1] * keys.shape[1]))
    for start in range(0, q.shape[0], block):
        rows = slice(start, start + block)
        some, lse[rows] = _attend(q[rows], keys, where[rows], sink, scale)
        if positions is not None and inverse_frequencies is not None:
            some = rotate(some, positions[rows], inverse_frequencies, inverse=True)
        out[rows] = some.to(q.dtype)
    return out, lse


def _attend(
    q: torch.Tensor, keys: torch.Tensor, where: torch.Tensor, sink: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out float64, lse)."""
    valid = where >= 0
    gathered = keys[torch.where(valid, where, keys.shape[0] - 1)]
    scores = torch.einsum("rhd,rkd->rhk", q.double(), gathered) * scale
    scores = scores.masked_fill(~valid.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else torch.full_like(scores.sum(-1), float("-inf"))
    empty = torch.isneginf(lse)
    weights = torch.exp(scores - torch.where(empty, 0.0, lse).unsqueeze(-1))
    out = torch.einsum("rhk,rkd->rhd", weights, gathered[..., :VALUE_DIM])
    if sink is not None:
        # exp(lse) / (exp(lse) + exp(sink)), the sink applied once and after everything is merged
        share = torch.sigmoid(lse - sink.double())
        out = out * torch.where(empty, 0.0, share).unsqueeze(-1)
    return out, lse.float()


def _named_rows(
    cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float64 rows of every distinct slot that is named, int [R, K] where each index's row lies from `offset`, or -1)."""
    active = indices != -1
    if lengths is not None:
        active &= torch.arange(indices.shape[1], device=indices.device) < lengths.unsqueeze(1)
    active = in_pool("indices", indices, active, cache.shape[0] * cache.shape[1])
    slots, inverse = torch.unique(indices[active], return_inverse=True)
    where = torch.full(indices.shape, -1, dtype=torch.int64, device=indices.device)
    where[active] = inverse + offset
    return layout_of(cache).read(cache, slots).double(), where
