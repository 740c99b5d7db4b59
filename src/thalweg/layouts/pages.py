"""Where a slot lies: page id times the tensor's own stride, in 64 bits, whatever gaps lie between pages."""

import torch


def check_cache(cache: torch.Tensor, dtype: torch.dtype, width: int | None, layout: str) -> None:
    """Raises ValueError unless `cache` is `[pages, page_slots, 1, width]` (None: any width) of `dtype`, packed in a page."""
    if cache.dtype != dtype or cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[3] != (width or cache.shape[3]):
        raise ValueError(
            f"{layout} cache: got {cache.dtype} {tuple(cache.shape)}, "
            f"needs {dtype} [pages, page_slots, 1, {width or 'width'}]"
        )
    width = cache.shape[3]
    if cache.stride(3) != 1 or (cache.shape[1] > 1 and cache.stride(1) != width):
        raise ValueError(f"{layout} cache: bytes inside a page must be packed, got strides {cache.stride()}")
    if cache.shape[0] > 1 and cache.stride(0) < cache.shape[1] * width:
        raise ValueError(
            f"{layout} cache: pages overlap, got page stride {cache.stride(0)}, needs at least {cache.shape[1] * width}"
        )


def page_view(cache: torch.Tensor, page_elements: int) -> torch.Tensor:
    """`cache` as `[pages, page_elements]`, the page stride taken from the tensor."""
    return cache.as_strided((cache.shape[0], page_elements), (cache.stride(0), 1), cache.storage_offset())


def split_slots(slots: torch.Tensor, page_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page ids and slots within the page, int64, of slot ids >= 0."""
    slots = slots.long()
    return slots // page_slots, slots % page_slots


def allocate_pages(
    pages: int, page_slots: int, width: int, page_elements: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A zeroed `[pages, page_slots, 1, width]` whose page stride is `page_elements` (at least page_slots * width)."""
    storage = torch.zeros(pages, page_elements, dtype=dtype, device=device)
    return storage.as_strided((pages, page_slots, 1, width), (page_elements, width, width, 1))
