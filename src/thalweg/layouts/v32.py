"""`v32`, the main cache of DeepSeek-V3.2 and GLM-5: 656 B a slot, inline: 512 e4m3, 4 fp32 scales, 64 bf16.

One scale per 128 latent channels, max(amax, 1e-4) / 448 unrounded. The tensor is uint8 `[pages, page_slots, 1, 656]`.
Softmax runs over all 576 channels, values are the first 512. Source: FlashMLA's fp8 sparse decode.
"""

import torch

from thalweg.layouts import sizes, work
from thalweg.layouts.e4m3 import amax_scale, to_e4m3
from thalweg.layouts.pages import allocate_pages, check_cache, page_view, split_slots

NAME = "v32"
WIDTH = sizes.MLA_DIM
_GROUPS = sizes.LATENT_DIM // sizes.V32_SCALE_GROUP
_SCALES_END = sizes.LATENT_DIM + 4 * _GROUPS


def allocate(pages: int, page_slots: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A zeroed cache of `pages` pages."""
    stride = sizes.v32_page_bytes(page_slots)
    return allocate_pages(pages, page_slots, sizes.V32_SLOT_BYTES, stride, torch.uint8, device)


def check(cache: torch.Tensor) -> None:
    """Raises ValueError if `cache` is not a v32 cache."""
    check_cache(cache, torch.uint8, sizes.V32_SLOT_BYTES, NAME)


def encode(rows: torch.Tensor) -> torch.Tensor:
    """Rows `[N, 576]` -> uint8 `[N, 656]`."""
    latent = rows[:, : sizes.LATENT_DIM].float().unflatten(1, (_GROUPS, sizes.V32_SCALE_GROUP))
    scale = amax_scale(latent)
    codes = to_e4m3(latent / scale.unsqueeze(-1)).flatten(1)
    rope = rows[:, sizes.LATENT_DIM :].to(torch.bfloat16).contiguous()
    return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8), rope.view(torch.uint8)], dim=1)


def decode(data: torch.Tensor) -> torch.Tensor:
    """uint8 `[N, 656]` -> float32 `[N, 576]` (codes times scale, one rounding)."""
    codes = data[:, : sizes.LATENT_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scale = data[:, sizes.LATENT_DIM : _SCALES_END].contiguous().view(torch.float32)
    rope = data[:, _SCALES_END:].contiguous().view(torch.bfloat16).float()
    return torch.cat([codes * scale.repeat_interleave(sizes.V32_SCALE_GROUP, dim=1), rope], dim=1)


def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Stores rows `[N, 576]` at `slots` (int `[N]`, -1 = not stored). Other slots and gaps stay as they were."""
    keep = slots >= 0
    page, slot = split_slots(slots[keep], cache.shape[1])
    blocks(cache)[0][page, slot] = encode(rows[keep])


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 rows `[N, 576]` at `slots` (int `[N]`, all >= 0)."""
    work.count_read(cache, slots)
    page, slot = split_slots(slots, cache.shape[1])
    return decode(blocks(cache)[0][page, slot])


def blocks(cache: torch.Tensor) -> tuple[torch.Tensor]:
    """The bytes of a slot as views `[pages, page_slots, elements]`: one block."""
    page_slots = cache.shape[1]
    return (page_view(cache, page_slots * sizes.V32_SLOT_BYTES).unflatten(1, (page_slots, sizes.V32_SLOT_BYTES)),)
