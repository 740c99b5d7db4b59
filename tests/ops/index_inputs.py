"""Inputs of the indexer's operations: a paged key cache with page tables, and its scores in float64 by loops."""

from dataclasses import dataclass

import numpy as np
import torch

from tests.layouts.number_formats import E4M3
from tests.ops.builders import page_table, randn, seeded, wide
from thalweg.layouts import exact, index_fp8

HEADS, DIM = 16, 128


@dataclass
class IndexInputs:
    """Arguments of mqa_logits by name; `keys` are the cache's rows as the operation must see them, float64."""

    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    row_to_request: torch.Tensor | None

    def arguments(self) -> dict[str, torch.Tensor | None]:
        return dict(vars(self))

    def request(self, row: int) -> int:
        return row if self.row_to_request is None else int(self.row_to_request[row])

    def slot(self, row: int, entry: int, page_slots: int) -> int:
        page = int(self.page_table[self.request(row), entry // self.cache.shape[1]])
        return page * page_slots + entry % self.cache.shape[1]

    def scores(self, row: int) -> np.ndarray:
        """sum_h w_h relu(q_h . k) of the row's live entries, float64."""
        length = max(int(self.lengths[row]), 0)
        slots = torch.tensor([self.slot(row, e, self.cache.shape[1]) for e in range(length)], dtype=torch.long)
        if length == 0:
            return np.zeros(0)
        if self.cache.dtype == torch.uint8:
            codes, scales = index_fp8.read_codes(self.cache, slots)
            keys = E4M3[codes.view(torch.uint8).numpy()] * wide(scales)[:, None]
            q = E4M3[self.q[row].view(torch.uint8).numpy()]
        else:
            keys, q = wide(exact.read(self.cache, slots)), wide(self.q[row])
        return np.maximum(keys @ q.T, 0.0) @ wide(self.weights[row])


def index_inputs(
    lengths: list[int],
    *,
    rows_per_request: int = 1,
    layout: str = "index_fp8",
    page_keys: int = 64,
    table_width: int | None = None,
    seed: int = 0,
    heads: int = HEADS,
) -> IndexInputs:
    """One length a row; requests own distinct shuffled pages; page 0 and every key past a request's own hold NaN."""
    g = seeded(seed)
    requests = len(lengths) // rows_per_request
    pages = max(1, -(-max([*lengths, 1]) // page_keys))
    pool = 1 + requests * pages + 2
    q = randn(g, len(lengths), heads, DIM)
    table = page_table(g, requests, pages, table_width or pages + 1, pool)
    if layout == "index_fp8":
        q = (q * 50).to(torch.float8_e4m3fn)
        cache = index_fp8.allocate(pool, page_keys)
        cache.fill_(0xFF)
    else:
        cache = exact.allocate(pool, page_keys, DIM)
        cache.fill_(float("nan"))
    module = index_fp8 if layout == "index_fp8" else exact
    for request in range(requests):
        live = max(0, *lengths[request * rows_per_request : (request + 1) * rows_per_request])
        entries = torch.arange(live)
        slots = table[request, entries // page_keys].long() * page_keys + entries % page_keys
        module.write(cache, slots, randn(g, live, DIM))
    owner = None
    if rows_per_request > 1:
        owner = torch.arange(requests, dtype=torch.int32).repeat_interleave(rows_per_request)
    weights = randn(g, len(lengths), heads)
    return IndexInputs(q, cache, weights, torch.tensor(lengths, dtype=torch.int32), table, owner)
