"""`v4`, the main cache of DeepSeek-V4: rows of 512 channels as 448 e4m3 with 7 ue8m0 scales and 64 bf16, 584 B a slot.

A page of P slots holds P x 576 B of data (448 e4m3, then 64 bf16 little endian), then P x 8 B of scales (7, a pad of 0).
The tensor is uint8 `[pages, P, 1, 584]`: its shape carries the page size, its stride the distance between pages.
Source: FlashMLA and SGLang's DeepSeek-V4 cache (April 2026).
"""

import torch

from thalweg.layouts import sizes, work
from thalweg.layouts.e4m3 import AMAX_FLOOR, over_e4m3_max, to_e4m3, ue8m0_ceil, ue8m0_value
from thalweg.layouts.pages import allocate_pages, check_cache, page_view, split_slots

NAME = "v4"
WIDTH = sizes.LATENT_DIM
_GROUPS = sizes.NOPE_DIM // sizes.V4_SCALE_GROUP


def allocate(pages: int, page_slots: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A zeroed cache of `pages` pages at the stride that SGLang and FlashMLA use."""
    stride = sizes.v4_page_bytes(page_slots)
    return allocate_pages(pages, page_slots, sizes.V4_SLOT_BYTES, stride, torch.uint8, device)


def check(cache: torch.Tensor) -> None:
    """Raises ValueError if `cache` is not a v4 cache."""
    check_cache(cache, torch.uint8, sizes.V4_SLOT_BYTES, NAME)


def encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 or bf16 rows `[N, 512]` -> (data uint8 `[N, 576]`, scales uint8 `[N, 8]`).

    The scale of 64 channels is max(amax, 1e-4) / 448 rounded up to a power of two.
    """
    nope = rows[:, : sizes.NOPE_DIM].float().unflatten(1, (_GROUPS, sizes.V4_SCALE_GROUP))
    codes = ue8m0_ceil(over_e4m3_max(nope.abs().amax(dim=-1).clamp(min=AMAX_FLOOR)))
    scaled = nope / ue8m0_value(codes).unsqueeze(-1)
    data = torch.cat(
        [
            to_e4m3(scaled).flatten(1).view(torch.uint8),
            rows[:, sizes.NOPE_DIM :].to(torch.bfloat16).contiguous().view(torch.uint8),
        ],
        dim=1,
    )
    pad = torch.zeros(rows.shape[0], 1, dtype=torch.uint8, device=rows.device)
    return data, torch.cat([codes, pad], dim=1)


def decode(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(uint8 `[N, 576]`, uint8 `[N, 8]`) -> float32 `[N, 512]`, exact."""
    codes = data[:, : sizes.NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scale = ue8m0_value(scales[:, :_GROUPS]).repeat_interleave(sizes.V4_SCALE_GROUP, dim=1)
    rope = data[:, sizes.NOPE_DIM :].contiguous().view(torch.bfloat16).float()
    return torch.cat([codes * scale, rope], dim=1)


def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Stores rows `[N, 512]` at `slots` (int `[N]`, -1 = not stored). Other slots and gaps stay as they were."""
    keep = slots >= 0
    page, slot = split_slots(slots[keep], cache.shape[1])
    data, scales = encode(rows[keep])
    data_block, scale_block = blocks(cache)
    data_block[page, slot] = data
    scale_block[page, slot] = scales


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 rows `[N, 512]` at `slots` (int `[N]`, all >= 0)."""
    work.count_read(cache, slots)
    page, slot = split_slots(slots, cache.shape[1])
    data_block, scale_block = blocks(cache)
    return decode(data_block[page, slot], scale_block[page, slot])


def blocks(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a slot as views `[pages, page_slots, bytes]`: data and scales."""
    page_slots = cache.shape[1]
    page = page_view(cache, page_slots * sizes.V4_SLOT_BYTES)
    data_bytes = page_slots * sizes.V4_DATA_BYTES
    data = page[:, :data_bytes].unflatten(1, (page_slots, sizes.V4_DATA_BYTES))
    return data, page[:, data_bytes:].unflatten(1, (page_slots, sizes.V4_SCALE_BYTES))
