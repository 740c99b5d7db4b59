"""`index_fp8`, the keys of the lightning indexer: 128 e4m3 and one fp32 scale a key, 132 B.

A page of 64 keys holds 64 x 128 B of codes, then 64 fp32 scales little endian: 8,448 B. The tensor is uint8
`[pages, 64, 1, 132]`. Source: DeepGEMM's paged MQA logits and SGLang's index-key cache.
"""

import torch

from thalweg.layouts import sizes, work
from thalweg.layouts.e4m3 import amax_scale, to_e4m3
from thalweg.layouts.pages import allocate_pages, check_cache, page_view, split_slots

NAME = "index_fp8"
WIDTH = sizes.INDEX_DIM


def allocate(pages: int, page_slots: int = sizes.INDEX_PAGE_KEYS, device: torch.device | str = "cpu") -> torch.Tensor:
    """A zeroed cache of `pages` pages."""
    stride = sizes.index_fp8_page_bytes(page_slots)
    return allocate_pages(pages, page_slots, sizes.INDEX_FP8_KEY_BYTES, stride, torch.uint8, device)


def check(cache: torch.Tensor) -> None:
    """Raises ValueError if `cache` is not an index_fp8 cache."""
    check_cache(cache, torch.uint8, sizes.INDEX_FP8_KEY_BYTES, NAME)


def encode(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., 128]` -> (e4m3 `[..., 128]`, scales float32 `[...]`), scale = max(amax, 1e-4) / 448 unrounded."""
    keys = keys.float()
    scale = amax_scale(keys)
    return to_e4m3(keys / scale.unsqueeze(-1)), scale


def write(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Stores keys `[N, 128]` at `slots` (int `[N]`, -1 = not stored). Other slots and gaps stay as they were."""
    keep = slots >= 0
    page, slot = split_slots(slots[keep], cache.shape[1])
    codes, scale = encode(keys[keep])
    code_block, scale_block = blocks(cache)
    code_block[page, slot] = codes.view(torch.uint8)
    scale_block[page, slot] = scale.unsqueeze(-1).contiguous().view(torch.uint8)


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 keys `[N, 128]` (codes times scale, one rounding) at `slots` (int `[N]`, all >= 0)."""
    codes, scale = read_codes(cache, slots)
    return codes.float() * scale.unsqueeze(-1)


def read_codes(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 codes `[N, 128]`, float32 scales `[N]`) at `slots` (int `[N]`, all >= 0)."""
    work.count_read(cache, slots)
    page, slot = split_slots(slots, cache.shape[1])
    code_block, scale_block = blocks(cache)
    scale = scale_block[page, slot].contiguous().view(torch.float32).squeeze(-1)
    return code_block[page, slot].contiguous().view(torch.float8_e4m3fn), scale


def blocks(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a slot as views `[pages, page_slots, bytes]`: codes and scales."""
    page_keys = cache.shape[1]
    page = page_view(cache, page_keys * sizes.INDEX_FP8_KEY_BYTES)
    code_bytes = page_keys * sizes.INDEX_DIM
    codes = page[:, :code_bytes].unflatten(1, (page_keys, sizes.INDEX_DIM))
    return codes, page[:, code_bytes:].unflatten(1, (page_keys, sizes.INDEX_FP8_SCALE_BYTES))
