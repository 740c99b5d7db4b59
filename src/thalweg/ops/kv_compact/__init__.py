"""Moves cached rows between slots in every cache of a list: accepted branches and scattered pages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.layouts.registry import layout_of
from thalweg.ops import dispatch
from thalweg.ops.checks import check_same_device, check_tensor, require
from thalweg.ops.kv_compact import reference

dispatch.register("kv_compact", "reference", reference.kv_compact)


def kv_compact(
    caches: Sequence[torch.Tensor],
    sources: torch.Tensor,
    targets: torch.Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Copies the bytes of slot sources[i] to slot targets[i] in every cache, in place, as if all were read before any write.

    caches: any layouts, of one page size and page count (all layers of a pool, c4 entries and their index keys too);
    sources, targets int [N], -1 = no move.
    Targets must be distinct: with THALWEG_CHECK=1 one that is named twice raises IndexError, without it either move may win.
    Raises ValueError where the caches do not fit each other.
    """
    require(len(caches) > 0, "caches: got an empty list")
    integer = (torch.int32, torch.int64)
    check_tensor("sources", sources, (None,), integer)
    check_tensor("targets", targets, (sources.shape[0],), integer)
    kinds = sorted({(cache.shape[1], cache.shape[0]) for cache in caches})
    require(len(kinds) == 1, f"caches: got (page size, pages) {kinds}, needs one page size and page count in a call")
    for cache in caches:
        layout_of(cache)
        check_same_device(cache=cache, sources=sources, targets=targets)
    _kv_compact(caches, sources, targets, implementation)


@torch.library.custom_op("thalweg::kv_compact", mutates_args=("caches",))
def _kv_compact(caches: Sequence[Tensor], sources: Tensor, targets: Tensor, implementation: str | None) -> None:
    dispatch.run("kv_compact", implementation, caches[0].device, caches, sources, targets)


@_kv_compact.register_fake
def _(caches, sources, targets, implementation):
    return None
