"""Indexer scores in plain PyTorch, request by request: the pages that the lengths name, never the table's width."""

from collections.abc import Iterator

import torch

from thalweg.layouts import index_fp8
from thalweg.layouts.registry import layout_of
from thalweg.layouts.work import Work, count
from thalweg.ops.checks import in_pool

# Query rows x heads x keys scored at once, in elements (one row at least): a float64 block of 64 MiB.
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
    for _, rows, row_lengths, scores in score_requests(q, cache, weights, lengths, page_table, row_to_request):
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
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Some rows of one request at a time: (the request, the rows, their lengths, scores float32 [rows, longest of them]).

    The keys of a request are read once for all its rows, in blocks so that a prefill chunk needs no [rows, longest].
    """
    page_keys = cache.shape[1]
    requests, span = page_table.shape[0], page_table.shape[1] * page_keys
    if row_to_request is None:
        row_to_request = torch.arange(q.shape[0], device=q.device)
    live = in_pool("row_to_request", row_to_request, lengths > 0, requests)
    in_pool("lengths (last live entry)", lengths - 1, live, span)
    for request in torch.unique(row_to_request[live]).tolist():
        rows = ((row_to_request == request) & live).nonzero().squeeze(1)
        longest = min(int(lengths[rows].max()), span)
        pages = page_table[request, : -(-longest // page_keys)].long()
        known = in_pool("page_table", pages, torch.ones_like(pages, dtype=torch.bool), cache.shape[0])
        entry = torch.arange(longest, device=q.device)
        reachable = known[entry // page_keys]
        slots = pages[entry // page_keys] * page_keys + entry % page_keys
        keys, scales = _read(cache, slots[reachable])
        for part in rows.split(max(1, _BLOCK_ELEMENTS // (q.shape[1] * longest))):
            width = min(int(lengths[part].max()), span)
            live_keys = int(reachable[:width].sum())
            scores = torch.full((part.numel(), width), float("-inf"), device=q.device)
            part_scales = None if scales is None else scales[:live_keys]
            scores[:, reachable[:width]] = score(q[part], weights[part], keys[:live_keys], part_scales)
            yield request, part, lengths[part], scores


def score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """sum_h weights_h relu(q_h . k) x the key's scale: float32 [rows, keys], float64 inside."""
    count(Work(keys_scored=q.shape[0] * keys.shape[0]))
    q, wide_keys = q.float().double(), keys.double()
    out = torch.empty(q.shape[0], keys.shape[0], device=q.device)
    block = max(1, _BLOCK_ELEMENTS // max(1, q.shape[1] * keys.shape[0]))
    for start in range(0, q.shape[0], block):
        rows = slice(start, start + block)
        # Every size named: there may be no key, where all pages are none.
        dots = torch.relu(q[rows].flatten(0, 1) @ wide_keys.T).view(*q[rows].shape[:2], keys.shape[0])
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
    in_pool("starts", starts, live, keys.shape[0])
    in_pool("ends (last live key)", ends - 1, live, keys.shape[0])
    starts, ends = starts.clamp(min=0), ends.clamp(max=keys.shape[0])
    live = ends > starts
    # Rows that start together, as those of one request do: every other request's keys are none of their work.
    for first in torch.unique(starts[live]).tolist():
        rows = (live & (starts == first)).nonzero().squeeze(1)
        last = int(ends[rows].max())
        part = None if scales is None else scales[first:last]
        scores = score(q[rows], weights[rows], keys[first:last].float(), part)
        inside = torch.arange(first, last, device=q.device) < ends[rows].unsqueeze(1)
        out[rows, first:last] = torch.where(inside, scores, out[rows, first:last])


def _read(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    layout = layout_of(cache)
    if layout is index_fp8:
        codes, scales = index_fp8.read_codes(cache, slots)
        return codes.float(), scales
    return layout.read(cache, slots), None
