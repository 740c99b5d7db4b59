"""Which layout a cache tensor has: its dtype and last dimension say so."""

from types import ModuleType

import torch

from thalweg.layouts import exact, index_fp8, mla_bf16, sizes, v4, v32

_BY_SIGNATURE: dict[tuple[torch.dtype, int], ModuleType] = {
    (torch.uint8, sizes.V4_SLOT_BYTES): v4,
    (torch.uint8, sizes.INDEX_FP8_KEY_BYTES): index_fp8,
    (torch.uint8, sizes.V32_SLOT_BYTES): v32,
    (torch.bfloat16, sizes.MLA_DIM): mla_bf16,
}


def layout_of(cache: torch.Tensor) -> ModuleType:
    """The layout module (`NAME`, `read`, `write`, `check`) of `cache` `[pages, page_slots, 1, width]`.

    Raises ValueError, naming the layouts that exist, where none fits; also where the bytes inside a page are not packed or
    pages overlap.
    """
    width = cache.shape[-1] if cache.dim() else 0
    layout = exact if cache.dtype == torch.float32 else _BY_SIGNATURE.get((cache.dtype, width))
    if layout is None:
        known = ", ".join(f"{m.NAME} ({dtype}, width {row})" for (dtype, row), m in _BY_SIGNATURE.items())
        raise ValueError(
            f"no layout has {cache.dtype} rows of width {width}; known: {known}, exact (torch.float32, any width)"
        )
    layout.check(cache)
    return layout
