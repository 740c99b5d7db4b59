"""The cache of the engine: pools sized by tokens, page tables sized by the context ceiling, pages as requests grow."""

from dataclasses import dataclass

import torch

from thalweg.engine.pages import OutOfPages, PageAllocator
from thalweg.errors import UserError
from thalweg.layouts.sizes import LOGICAL_PAGE_TOKENS, pages_for
from thalweg.models.interface import Model, PoolSizes
from thalweg.models.weights.memory import available_bytes


@dataclass(frozen=True)
class CacheSettings:
    """context_length: the ceiling of one request, in tokens; it sizes page tables and nothing else. kv_tokens: what the pool
    holds over all requests. max_requests: how many run at once. chunk_tokens: rows of a step, which the window pool must
    hold beside the windows. snapshots: window pages kept for prompts to restart from. kv_layout: None = the model's first.
    """

    context_length: int
    kv_tokens: int
    max_requests: int = 1
    chunk_tokens: int = 256
    snapshots: int = 0
    kv_layout: str | None = None


class OutOfWindowPages(Exception):
    """The window pool has no free page: snapshots hold what running requests need."""


class CachePools:
    """Caches of a model and the tables that say which request owns which page. A request is known by its table row."""

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
        slots = [self.state_slot(row) for row in range(settings.max_requests)]
        self.state_slots = torch.tensor(slots, device=model.device)
        # The same tables on the host: what they hold is looked up here, never read back from a GPU.
        self._owned: list[dict[int, int]] = [{} for _ in range(settings.max_requests)]
        self._window_owned: list[dict[int, int]] = [{} for _ in range(settings.max_requests)]

    @staticmethod
    def state_slot(row: int) -> int:
        """The request's row of the compressors' state; slot 0 is nobody's."""
        return row + 1

    def page(self, row: int, number: int) -> int:
        """The id of the request's logical page `number` (tokens 256 x number on)."""
        return self._owned[row][number]

    def window_page(self, row: int, number: int) -> int:
        """The id of the request's window page `number`."""
        return self._window_owned[row][number]

    def grow(self, row: int, computed: int, length: int) -> None:
        """Gives the request, with `computed` tokens done, the pages for tokens up to `length`.

        Raises OutOfPages or OutOfWindowPages; what was given until then stays with the request.
        """
        for number in range(computed // LOGICAL_PAGE_TOKENS, pages_for(length, LOGICAL_PAGE_TOKENS)):
            if number not in self._owned[row]:
                self.put(row, number, self.pages.take())
            if self.window is not None and number not in self._window_owned[row]:
                try:
                    self.put_window(row, number, self.window_pages.take())
                except OutOfPages as error:
                    raise OutOfWindowPages(str(error)) from None

    def put(self, row: int, number: int, page: int) -> None:
        """Makes `page` the request's logical page `number`; the request is one of its owners."""
        self._owned[row][number] = page
        self.page_table[row, number] = page

    def put_window(self, row: int, number: int, page: int) -> None:
        """Makes `page` the request's window page `number`; the request is one of its owners."""
        self._window_owned[row][number] = page
        self.window_table[row, number] = page

    def trim(self, row: int, computed: int) -> None:
        """Takes back the window pages that no token from `computed` on sees."""
        if self.window is None:
            return
        first_live = max(computed - self.window + 1, 0) // LOGICAL_PAGE_TOKENS
        for number in [number for number in self._window_owned[row] if number < first_live]:
            self.window_pages.give_back(self._window_owned[row].pop(number))
            self.window_table[row, number] = -1

    def release(self, row: int) -> None:
        """Takes back everything that the request owns."""
        for table, owned, pool in (
            (self.page_table, self._owned, self.pages),
            (self.window_table, self._window_owned, self.window_pages),
        ):
            for page in owned[row].values():
                pool.give_back(page)
            owned[row].clear()
            table[row] = -1


def _pool_sizes(settings: CacheSettings, window: int | None) -> PoolSizes:
    pages = 1 + pages_for(settings.kv_tokens, LOGICAL_PAGE_TOKENS)
    if window is None:
        return PoolSizes(pages, window_pages=0, state_slots=0)
    # A request owns window pages for its last tokens and for the rows it computes; a step's rows are shared out among all.
    alone = pages_for(window - 1, LOGICAL_PAGE_TOKENS) + 2
    shared = pages_for(settings.chunk_tokens, LOGICAL_PAGE_TOKENS)
    windows = settings.max_requests * alone + shared + settings.snapshots
    return PoolSizes(pages, 1 + windows, 1 + settings.max_requests)


def check_settings(settings: CacheSettings, ceiling: int) -> None:
    """Raises UserError for settings that no memory could make right; `ceiling`: the model's longest context, in tokens."""
    if not 1 <= settings.context_length <= ceiling:
        raise UserError(f"context length {settings.context_length:,}: this model's is 1 to {ceiling:,} tokens")
    if settings.kv_tokens < settings.context_length:
        raise UserError(
            f"a pool of {settings.kv_tokens:,} KV tokens cannot hold one request of the context length "
            f"{settings.context_length:,}: raise --kv-tokens or lower --context-length"
        )
    if settings.max_requests < 1 or settings.chunk_tokens < 1:
        raise UserError(
            f"max-requests is {settings.max_requests} and chunk-tokens {settings.chunk_tokens}; both are 1 or more"
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
