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

    caches: tensors of one layout family and page size each (all layers of a pool); sources, targets int [N], -1 = no move.
    Targets must be distinct. Raises ValueError where shapes or page sizes do not fit.
    """
    require(len(caches) > 0, "caches: got an empty list")
    integer = (torch.int32, torch.int64)
    check_tensor("sources", sources, (None,), integer)
    check_tensor("targets", targets, (sources.shape[0],), integer)
    page_slots = {cache.shape[1] for cache in caches}
    require(len(page_slots) == 1, f"caches: got page sizes {sorted(page_slots)}, needs one page size in a call")
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
