"""Indexer scores in plain PyTorch, request by request: the pages that the lengths name, never the table's width."""

from collections.abc import Iterator

import torch

from thalweg.layouts import index_fp8
from thalweg.layouts.registry import layout_of
from thalweg.layouts.work import Work, count
from thalweg.ops.checks import in_pool

# Query rows x heads x keys scored at once, in elements: bounds the float64 block to 64 MiB.
_BLOCK_ELEMENTS = 8 * 2**20


def mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    out: torch.Tensor,
    clean: bool,
) -> None:
    """See `thalweg.ops.mqa_logits`."""
    for rows, row_lengths, scores in score_requests(q, cache, weights, lengths, page_table, row_to_request):
        column = torch.arange(scores.shape[1], device=q.device)
        live = column < row_lengths.unsqueeze(1)
        out[rows, : scores.shape[1]] = torch.where(live, scores, out[rows, : scores.shape[1]])
    if clean:
        column = torch.arange(out.shape[1], device=q.device)
        out.masked_fill_(column >= lengths.unsqueeze(1), float("-inf"))


def score_requests(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each request with live keys: (its rows, their lengths, scores float32 [rows, longest]). Keys are read once."""
    page_keys = cache.shape[1]
    if row_to_request is None:
        row_to_request = torch.arange(q.shape[0], device=q.device)
    for request in torch.unique(row_to_request[lengths > 0]).tolist():
        rows = ((row_to_request == request) & (lengths > 0)).nonzero().squeeze(1)
        longest = int(lengths[rows].max())
        pages = page_table[request, : -(-longest // page_keys)].long()
        known = in_pool("page_table", pages, torch.ones_like(pages, dtype=torch.bool), cache.shape[0])
        entry = torch.arange(longest, device=q.device)
        reachable = known[entry // page_keys]
        slots = pages[entry // page_keys] * page_keys + entry % page_keys
        keys, scales = _read(cache, torch.where(reachable, slots, 0)[reachable])
        scores = torch.full((rows.numel(), longest), float("-inf"), device=q.device)
        scores[:, reachable] = score(q[rows], weights[rows], keys, scales)
        yield rows, lengths[rows], scores


def score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """sum_h weights_h relu(q_h . k) x the key's scale: float32 [rows, keys], float64 inside."""
    count(Work(keys_scored=q.shape[0] * keys.shape[0]))
    q, wide_keys = q.float().double(), keys.double()
    out = torch.empty(q.shape[0], keys.shape[0], device=q.device)
    block = max(1, _BLOCK_ELEMENTS // max(1, q.shape[1] * keys.shape[0]))
    for start in range(0, q.shape[0], block):
        rows = slice(start, start + block)
        dots = torch.relu(q[rows].flatten(0, 1) @ wide_keys.T).view(-1, q.shape[1], keys.shape[0])
        # A product and a sum over heads, not a matmul: its order does not depend on the number of rows.
        total = (dots * weights[rows].double().unsqueeze(-1)).sum(dim=1)
        out[rows] = (total if scales is None else total * scales.double()).float()
    return out


def mqa_logits_ragged(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `thalweg.ops.mqa_logits_ragged`."""
    live = ends > starts
    if bool(live.any()):
        first, last = int(starts[live].min()), int(ends[live].max())
        part = None if scales is None else scales[first:last]
        scores = score(q, weights, keys[first:last].float(), part)
        column = torch.arange(first, last, device=q.device)
        inside = (column >= starts.unsqueeze(1)) & (column < ends.unsqueeze(1))
        out[:, first:last] = torch.where(inside, scores, out[:, first:last])


def _read(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    layout = layout_of(cache)
    if layout is index_fp8:
        codes, scales = index_fp8.read_codes(cache, slots)
        return codes.float(), scales
    return layout.read(cache, slots), None
