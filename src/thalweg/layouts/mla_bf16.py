"""`mla_bf16`, the cache of dense latent attention (DeepSeek-V3, R1, Kimi K2): 512 latent and 64 rope channels, bf16.

1,152 B a slot, any page size, 1 included. The tensor is bfloat16 `[pages, page_slots, 1, 576]`.
"""

import torch

from thalweg.layouts import sizes, work
from thalweg.layouts.pages import allocate_pages, check_cache, page_view, split_slots

NAME = "mla_bf16"
WIDTH = sizes.MLA_DIM


def allocate(pages: int, page_slots: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A zeroed cache of `pages` pages."""
    return allocate_pages(pages, page_slots, WIDTH, page_slots * WIDTH, torch.bfloat16, device)


def check(cache: torch.Tensor) -> None:
    """Raises ValueError if `cache` is not an mla_bf16 cache."""
    check_cache(cache, torch.bfloat16, WIDTH, NAME)


def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Stores rows `[N, 576]`, rounded to bf16, at `slots` (int `[N]`, -1 = not stored)."""
    keep = slots >= 0
    page, slot = split_slots(slots[keep], cache.shape[1])
    blocks(cache)[0][page, slot] = rows[keep].to(torch.bfloat16)


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 rows `[N, 576]` at `slots` (int `[N]`, all >= 0)."""
    work.count_read(cache, slots)
    page, slot = split_slots(slots, cache.shape[1])
    return blocks(cache)[0][page, slot].float()


def blocks(cache: torch.Tensor) -> tuple[torch.Tensor]:
    """The bytes of a slot as views `[pages, page_slots, elements]`: one block."""
    page_slots = cache.shape[1]
    return (page_view(cache, page_slots * WIDTH).unflatten(1, (page_slots, WIDTH)),)
