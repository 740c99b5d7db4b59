"""Byte moves between slots in plain PyTorch: exact in every layout, nothing is decoded."""

from collections.abc import Sequence

import torch

from thalweg.layouts.registry import layout_of
from thalweg.ops.checks import debug_checks, in_pool


def kv_compact(caches: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See `thalweg.ops.kv_compact`."""
    size = caches[0].shape[0] * caches[0].shape[1]
    moves = (sources != -1) & (targets != -1)
    moves = in_pool("kv_compact sources", sources, moves, size) & in_pool("kv_compact targets", targets, moves, size)
    source, target = sources[moves].long(), targets[moves].long()
    if debug_checks() and torch.unique(target).numel() < target.numel():
        raise IndexError("kv_compact targets: a slot is named twice")
    page_slots = caches[0].shape[1]
    for cache in caches:
        for block in layout_of(cache).blocks(cache):
            block[target // page_slots, target % page_slots] = block[source // page_slots, source % page_slots]
