"""Exact selection of the k highest scores of every row, over the row's own length."""

import torch
from torch import Tensor

from thalweg.ops import dispatch
from thalweg.ops.checks import check_same_device, check_tensor, require
from thalweg.ops.cuda import hopper_unsupported
from thalweg.ops.hardware import on_first_call, triton_avoided, triton_unsupported
from thalweg.ops.topk import reference

_KERNELS = "thalweg.ops.topk.triton"
_HOPPER = "thalweg.ops.topk.hopper"

# Preferred where it runs: CUDA C++ for one architecture.
dispatch.register(
    "topk",
    "hopper",
    on_first_call(_HOPPER, "topk"),
    hopper_unsupported,
    rejects=on_first_call(_HOPPER, "rejects"),
)
dispatch.register(
    "topk",
    "triton",
    on_first_call(_KERNELS, "topk"),
    triton_unsupported,
    triton_avoided,
    on_first_call(_KERNELS, "rejects"),
)
dispatch.register("topk", "reference", reference.topk)


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    ordered: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
) -> torch.Tensor:
    """Indices int32 [R, k] of the k highest of logits[r, :lengths[r]], the rest -1.

    logits float32 [R, N], columns past a length may hold anything; lengths int [R], <= 0 = empty row, at most N; k >= 1. The
    multiset of scores is exact: never too few, never one twice. ordered=True: highest first. Equal scores: any of them, or
    the lower index first with deterministic=True. Raises ValueError for shapes that do not fit.
    """
    check_tensor("logits", logits, (None, None), (torch.float32,))
    check_tensor("lengths", lengths, (logits.shape[0],), (torch.int32, torch.int64))
    require(k >= 1, f"k: got {k}, needs at least 1")
    check_same_device(logits=logits, lengths=lengths)
    return _topk(logits, lengths, k, ordered, deterministic, implementation)


@torch.library.custom_op("thalweg::topk", mutates_args=())
def _topk(
    logits: Tensor, lengths: Tensor, k: int, ordered: bool, deterministic: bool, implementation: str | None
) -> Tensor:
    return dispatch.run("topk", implementation, logits.device, logits, lengths, k, ordered, deterministic)


@_topk.register_fake
def _(logits, lengths, k, ordered, deterministic, implementation):
    return lengths.new_empty((logits.shape[0], k), dtype=torch.int32)
