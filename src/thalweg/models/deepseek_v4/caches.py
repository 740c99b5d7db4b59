"""The pools of DeepSeek-V4: window rows, c4 and c128 entries, index keys, and the compressors' carried state.

A logical page of 256 tokens owns one c4 page, one index page and one c128 page under the same id in every layer; window
pages and state rows are numbered apart, because a request keeps few of them however long it grows.
"""

from dataclasses import dataclass

import torch

from thalweg.layouts import exact, index_fp8, sizes, v4
from thalweg.models.config_deepseek_v4 import CSA, HCA, DeepseekV4Config
from thalweg.models.interface import PoolSizes

KV_LAYOUTS = ("v4", "exact")
_C4_RING = 8


@dataclass(frozen=True)
class LayerCaches:
    """One layer's tensors; what its kind of layer does not have is None."""

    window: torch.Tensor
    compressed: torch.Tensor | None = None
    compressed_state: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    index_state: torch.Tensor | None = None


def allocate(
    config: DeepseekV4Config, pool: PoolSizes, kv_layout: str, device: torch.device, *, num_mtp: int = 0
) -> list[LayerCaches]:
    """Caches of every layer, those of `num_mtp` MTP blocks (window only) after the main ones."""
    ratios = config.compress_ratios + (0,) * num_mtp
    return [_layer(config, ratio, pool, kv_layout, device) for ratio in ratios]


def carry_out(caches: list[LayerCaches], state_slot: int) -> list[torch.Tensor]:
    """What a request carries at a 256-token boundary: of every c4 compressor, the [0, d) half of the four rows before it.

    Nothing else is open there: c128 windows are complete, and the other half of those rows went into the last entry.
    """
    return [rows.clone() for rows in _open_rows(caches, state_slot)]


def carry_in(caches: list[LayerCaches], state_slot: int, carried: list[torch.Tensor]) -> None:
    """Writes what `carry_out` copied into the state of a request that goes on behind the same tokens."""
    for rows, copy in zip(_open_rows(caches, state_slot), carried, strict=True):
        rows.copy_(copy)


def _open_rows(caches: list[LayerCaches], state_slot: int) -> list[torch.Tensor]:
    states = [
        state
        for layer in caches
        if layer.index_state is not None
        for state in (layer.compressed_state, layer.index_state)
    ]
    # Rows lie at position modulo 8: the four before a multiple of 256 are 4 to 7.
    return [state[state_slot, 4:, :, : state.shape[-1] // 2] for state in states if state is not None]


def page_slots(ratio: int) -> int:
    """Compressed entries in a logical page: 64 for c4, 2 for c128."""
    return sizes.LOGICAL_PAGE_TOKENS // ratio


def pool_bytes(config: DeepseekV4Config, pool: PoolSizes, kv_layout: str, *, num_mtp: int = 0) -> int:
    """What `allocate` takes, by the same arithmetic, before anything is allocated."""
    d, index_d = config.head_dim, config.index_head_dim
    total = 0
    for ratio in config.compress_ratios + (0,) * num_mtp:
        total += pool.window_pages * _page_bytes(kv_layout, sizes.LOGICAL_PAGE_TOKENS, d)
        if ratio in (CSA, HCA):
            total += pool.pages * _page_bytes(kv_layout, page_slots(ratio), d)
        if ratio == CSA:
            index_page = sizes.index_fp8_page_bytes() if kv_layout == "v4" else sizes.exact_page_bytes(64, index_d)
            total += pool.pages * index_page
            total += pool.state_slots * _C4_RING * 2 * (2 * d + 2 * index_d) * 4
        if ratio == HCA:
            total += pool.state_slots * HCA * 2 * d * 4
    return total


def _page_bytes(kv_layout: str, slots: int, width: int) -> int:
    return sizes.v4_page_bytes(slots) if kv_layout == "v4" else sizes.exact_page_bytes(slots, width)


def _layer(config: DeepseekV4Config, ratio: int, pool: PoolSizes, kv_layout: str, device: torch.device) -> LayerCaches:
    d, index_d = config.head_dim, config.index_head_dim

    def main(pages: int, slots: int) -> torch.Tensor:
        if kv_layout == "v4":
            return v4.allocate(pages, slots, device)
        return exact.allocate(pages, slots, d, device)

    def state(ring: int, width: int) -> torch.Tensor:
        return torch.zeros(pool.state_slots, ring, 2, width, dtype=torch.float32, device=device)

    window = main(pool.window_pages, sizes.LOGICAL_PAGE_TOKENS)
    if ratio == CSA:
        keys = (
            index_fp8.allocate(pool.pages, page_slots(CSA), device)
            if kv_layout == "v4"
            else exact.allocate(pool.pages, page_slots(CSA), index_d, device)
        )
        compressed = main(pool.pages, page_slots(CSA))
        return LayerCaches(window, compressed, state(_C4_RING, 2 * d), keys, state(_C4_RING, 2 * index_d))
    if ratio == HCA:
        return LayerCaches(window, main(pool.pages, page_slots(HCA)), state(HCA, d))
    return LayerCaches(window)
