"""`exact`, float32 rows as they are, any width: what oracle comparisons run on.

The tensor is float32 `[pages, page_slots, 1, width]`.
"""

import torch

from thalweg.layouts import work
from thalweg.layouts.pages import allocate_pages, check_cache, page_view, split_slots

NAME = "exact"


def allocate(pages: int, page_slots: int, width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A zeroed cache of `pages` pages of rows `width` channels wide."""
    return allocate_pages(pages, page_slots, width, page_slots * width, torch.float32, device)


def check(cache: torch.Tensor) -> None:
    """Raises ValueError if `cache` is not an exact cache."""
    check_cache(cache, torch.float32, cache.shape[-1], NAME)


def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Stores rows `[N, width]` at `slots` (int `[N]`, -1 = not stored)."""
    keep = slots >= 0
    page, slot = split_slots(slots[keep], cache.shape[1])
    blocks(cache)[0][page, slot] = rows[keep].float()


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 rows `[N, width]` at `slots` (int `[N]`, all >= 0)."""
    work.count_read(cache, slots)
    page, slot = split_slots(slots, cache.shape[1])
    return blocks(cache)[0][page, slot]


def blocks(cache: torch.Tensor) -> tuple[torch.Tensor]:
    """The bytes of a slot as views `[pages, page_slots, elements]`: one block."""
    page_slots, width = cache.shape[1], cache.shape[3]
    return (page_view(cache, page_slots * width).unflatten(1, (page_slots, width)),)
