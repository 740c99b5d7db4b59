"""The cache of the engine: pools sized by tokens, page tables sized by the context ceiling, pages as requests grow."""

from dataclasses import dataclass

import torch

from thalweg.engine.pages import PageAllocator
from thalweg.errors import UserError
from thalweg.layouts.sizes import LOGICAL_PAGE_TOKENS, pages_for
from thalweg.models.interface import Model, PoolSizes
from thalweg.models.weights.memory import available_bytes


@dataclass(frozen=True)
class CacheSettings:
    """context_length: the ceiling of one request, in tokens; it sizes page tables and nothing else. kv_tokens: what the pool
    holds over all requests. chunk_tokens: rows of a prefill step, which the window pool must hold beside the window."""

    context_length: int
    kv_tokens: int
    max_requests: int = 1
    chunk_tokens: int = 256
    kv_layout: str | None = None


class OutOfRows(Exception):
    """Every table row of the pools belongs to a request that has not ended."""


class CachePools:
    """Caches of a model and the tables that say which request owns which page."""

    def __init__(self, model: Model, settings: CacheSettings) -> None:
        self.window = model.window
        self.settings = settings
        check_settings(settings, model.config.max_position_embeddings)
        sizes = _pool_sizes(settings, self.window)
        kv_layout = model.kv_layouts[0] if settings.kv_layout is None else settings.kv_layout
        _check_pool(model, settings, sizes, kv_layout)
        self.caches = model.allocate(sizes, kv_layout)
        self.pages = PageAllocator(sizes.pages)
        self.window_pages = PageAllocator(sizes.window_pages)
        width = pages_for(settings.context_length, LOGICAL_PAGE_TOKENS)
        self.page_table = torch.full((settings.max_requests, width), -1, dtype=torch.int64, device=model.device)
        self.window_table = torch.full_like(self.page_table, -1)
        self.state_slots = torch.arange(1, settings.max_requests + 1, device=model.device)
        self._free_rows = list(range(settings.max_requests - 1, -1, -1))

    def claim(self) -> int:
        """A table row for one request, until `release`. Raises OutOfRows where every one is claimed."""
        if not self._free_rows:
            raise OutOfRows(f"the pool serves {self.settings.max_requests} requests at once, and so many are running")
        return self._free_rows.pop()

    def grow(self, row: int, computed: int, length: int) -> None:
        """Gives the request in table row `row`, with `computed` tokens done, the pages for tokens up to `length`."""
        for page in range(computed // LOGICAL_PAGE_TOKENS, pages_for(length, LOGICAL_PAGE_TOKENS)):
            if self.page_table[row, page] < 0:
                self.page_table[row, page] = self.pages.take()
            if self.window is not None and self.window_table[row, page] < 0:
                self.window_table[row, page] = self.window_pages.take()

    def trim(self, row: int, before: int, computed: int) -> None:
        """Takes back the window pages that no row from `computed` on sees; `before` = tokens done at the last trim."""
        if self.window is None:
            return
        last_dead = (computed - self.window + 1) // LOGICAL_PAGE_TOKENS
        for page in range(max(before - self.window + 1, 0) // LOGICAL_PAGE_TOKENS, last_dead):
            self.window_pages.give_back(int(self.window_table[row, page]))
            self.window_table[row, page] = -1

    def release(self, row: int) -> None:
        """Takes back everything that the request in table row `row` owns, and the row."""
        for table, pool in ((self.page_table, self.pages), (self.window_table, self.window_pages)):
            for page in table[row][table[row] >= 0].tolist():
                pool.give_back(page)
            table[row] = -1
        self._free_rows.append(row)


def _pool_sizes(settings: CacheSettings, window: int | None) -> PoolSizes:
    pages = 1 + pages_for(settings.kv_tokens, LOGICAL_PAGE_TOKENS)
    if window is None:
        return PoolSizes(pages, window_pages=0, state_slots=0)
    live = pages_for(settings.chunk_tokens + window - 1, LOGICAL_PAGE_TOKENS) + 1
    return PoolSizes(pages, 1 + settings.max_requests * live, 1 + settings.max_requests)


def check_settings(settings: CacheSettings, ceiling: int) -> None:
    """Raises UserError for settings that no memory could make right; `ceiling`: the model's longest context, in tokens."""
    if not 1 <= settings.context_length <= ceiling:
        raise UserError(f"context length {settings.context_length:,}: this model's is 1 to {ceiling:,} tokens")
    if settings.kv_tokens < settings.context_length:
        raise UserError(
            f"a pool of {settings.kv_tokens:,} KV tokens cannot hold one request of the context length "
            f"{settings.context_length:,}: raise --kv-tokens or lower --context-length"
        )


def _check_pool(model: Model, settings: CacheSettings, sizes: PoolSizes, kv_layout: str) -> None:
    if kv_layout not in model.kv_layouts:
        raise UserError(f"KV layout {kv_layout}: possible for this model are {', '.join(model.kv_layouts)}")
    needed, available = model.pool_bytes(sizes, kv_layout), available_bytes(model.device)
    if needed > available:
        raise UserError(
            f"a pool of {settings.kv_tokens:,} KV tokens needs {needed / 2**30:.2f} GiB, {model.device} has "
            f"{available / 2**30:.2f} GiB available: lower --kv-tokens"
        )
