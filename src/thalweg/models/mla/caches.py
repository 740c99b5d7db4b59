"""The pools of the MLA family: one cache of 576 channels a layer, all numbered by the same pages of 256 tokens."""

import torch

from thalweg.errors import UserError
from thalweg.layouts import exact, mla_bf16, sizes
from thalweg.models.config_mla import MlaConfig

KV_LAYOUTS = ("mla_bf16", "exact")


def allocate(config: MlaConfig, num_pages: int, kv_layout: str, device: torch.device) -> list[torch.Tensor]:
    """Zeroed caches [num_pages, 256, 1, 576], one a layer. Page 0 is counted and never handed out."""
    _check_layout(kv_layout)
    slots = sizes.LOGICAL_PAGE_TOKENS
    if kv_layout == "exact":
        return [exact.allocate(num_pages, slots, sizes.MLA_DIM, device) for _ in range(config.num_layers)]
    return [mla_bf16.allocate(num_pages, slots, device) for _ in range(config.num_layers)]


def pool_bytes(config: MlaConfig, num_pages: int, kv_layout: str) -> int:
    """What `allocate` takes, by the same arithmetic, before anything is allocated."""
    _check_layout(kv_layout)
    slots = sizes.LOGICAL_PAGE_TOKENS
    exact_page, bf16_page = sizes.exact_page_bytes(slots, sizes.MLA_DIM), sizes.mla_bf16_page_bytes(slots)
    return config.num_layers * num_pages * (exact_page if kv_layout == "exact" else bf16_page)


def _check_layout(kv_layout: str) -> None:
    if kv_layout not in KV_LAYOUTS:
        raise UserError(f"KV layout {kv_layout!r}: the MLA family has {' and '.join(KV_LAYOUTS)}")
