"""Indexer scores (MQA logits): many query heads against one key head, weighted sum of ReLU, over the paged key cache.

score = (sum_h weights_h relu(q_h . codes)) x the key's scale. Source: DeepSeek-V3.2 and V4, the lightning indexer.
`lengths` count cache entries (c4: floor((t + 1) / 4)), not tokens.
"""

import torch
from torch import Tensor

from thalweg.layouts import exact, index_fp8
from thalweg.layouts.registry import layout_of
from thalweg.ops import dispatch
from thalweg.ops.checks import check_same_device, check_tensor, require
from thalweg.ops.cuda import hopper_unsupported
from thalweg.ops.hardware import on_first_call, triton_avoided, triton_unsupported
from thalweg.ops.mqa_logits import reference

_KERNELS = "thalweg.ops.mqa_logits.triton"
_HOPPER = "thalweg.ops.mqa_logits.hopper"

# Preferred where it runs: CUDA C++ for one architecture.
dispatch.register(
    "mqa_logits",
    "hopper",
    on_first_call(_HOPPER, "mqa_logits"),
    hopper_unsupported,
    rejects=on_first_call(_HOPPER, "rejects"),
)
# "triton" multiplies e4m3 where the card does; "triton_f16" always multiplies as float16, which loses nothing.
for _operation in ("mqa_logits", "mqa_logits_ragged"):
    for _name in ("triton", "triton_f16"):
        dispatch.register(
            _operation,
            _name,
            on_first_call(_KERNELS, _operation + _name.removeprefix("triton")),
            triton_unsupported,
            triton_avoided,
            on_first_call(_KERNELS, _operation + "_rejects"),
        )
dispatch.register("mqa_logits", "reference", reference.mqa_logits)
dispatch.register("mqa_logits_ragged", "reference", reference.mqa_logits_ragged)

_INTEGER = (torch.int32, torch.int64)


def mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    clean: bool = False,
    implementation: str | None = None,
) -> torch.Tensor:
    """Scores of every row against the keys of its request.

    q [R, Hq, 128] e4m3 for an index_fp8 cache, float32 [R, Hq, d] for an exact one; cache [P, keys, 1, .]; weights float32
    [R, Hq]; lengths int [R], <= 0 = empty row; page_table int [B, W]; row_to_request int [R] or None (row r is request r);
    out float32 [R, at least keys x W] or None (allocated at that width: pass a trimmed table where the ceiling is wide).
    Only live columns are written; clean=True also writes -inf past each length up to the width of `out`. With
    THALWEG_CHECK=1 these raise IndexError: a live page that is not in the pool (scores -inf otherwise), a live row's request
    that is not in the table (an empty row otherwise), a length past the table's width (clipped otherwise). Returns `out`.
    Raises ValueError for shapes that do not fit.
    """
    check_index_arguments(q, cache, weights, lengths, page_table, row_to_request)
    width = cache.shape[1] * page_table.shape[1]
    if out is None:
        out = torch.empty(q.shape[0], width, dtype=torch.float32, device=q.device)
    check_tensor("out", out, (q.shape[0], None), (torch.float32,))
    check_same_device(q=q, out=out)
    require(out.shape[1] >= width, f"out: got width {out.shape[1]}, the page table spans {width}")
    _logits(q, cache, weights, lengths, page_table, row_to_request, out, clean, implementation)
    return out


def mqa_logits_ragged(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Scores of row r against keys[starts[r]:ends[r]] of one contiguous key array: ragged prefill.

    q [R, Hq, d], keys [N, d] both e4m3 with scales float32 [N], or both float32 with scales None; weights float32 [R, Hq];
    starts, ends int [R], clipped to [0, N] (outside it IndexError with THALWEG_CHECK=1), end <= start = empty row; out
    float32 [R, N] or None. Only live columns are written. Returns `out`. Raises ValueError for shapes that do not fit.
    """
    check_tensor("q", q, (None, None, None), (torch.float8_e4m3fn, torch.float32))
    rows, heads, width = q.shape
    check_tensor("keys", keys, (None, width), (q.dtype,))
    require((scales is None) == (q.dtype == torch.float32), "scales: e4m3 keys need them, float32 keys have none")
    if scales is not None:
        check_tensor("scales", scales, (keys.shape[0],), (torch.float32,))
    check_tensor("weights", weights, (rows, heads), (torch.float32,))
    check_tensor("starts", starts, (rows,), _INTEGER)
    check_tensor("ends", ends, (rows,), _INTEGER)
    if out is None:
        out = torch.empty(rows, keys.shape[0], dtype=torch.float32, device=q.device)
    check_tensor("out", out, (rows, keys.shape[0]), (torch.float32,))
    check_same_device(q=q, keys=keys, scales=scales, weights=weights, starts=starts, ends=ends, out=out)
    _ragged(q, keys, scales, weights, starts, ends, out, implementation)
    return out


def check_index_arguments(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
) -> None:
    """Raises ValueError unless the arguments that scoring takes fit each other."""
    layout = layout_of(cache)
    require(layout in (index_fp8, exact), f"cache: got layout {layout.NAME}, index keys are index_fp8 or exact")
    dtype = torch.float8_e4m3fn if layout is index_fp8 else torch.float32
    width = index_fp8.WIDTH if layout is index_fp8 else cache.shape[3]
    check_tensor("q", q, (None, None, width), (dtype,))
    rows, heads = q.shape[0], q.shape[1]
    check_tensor("weights", weights, (rows, heads), (torch.float32,))
    check_tensor("lengths", lengths, (rows,), _INTEGER)
    check_tensor("page_table", page_table, (None, None), _INTEGER)
    if row_to_request is None:
        requests = page_table.shape[0]
        require(rows == requests, f"row_to_request: None needs one row a request, got {rows} rows, {requests} requests")
    else:
        check_tensor("row_to_request", row_to_request, (rows,), _INTEGER)
    check_same_device(
        q=q, cache=cache, weights=weights, lengths=lengths, page_table=page_table, row_to_request=row_to_request
    )


@torch.library.custom_op("thalweg::mqa_logits", mutates_args=("out",))
def _logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    row_to_request: Tensor | None,
    out: Tensor,
    clean: bool,
    implementation: str | None,
) -> None:
    args = (q, cache, weights, lengths, page_table, row_to_request, out, clean)
    dispatch.run("mqa_logits", implementation, q.device, *args)


@_logits.register_fake
def _(q, cache, weights, lengths, page_table, row_to_request, out, clean, implementation):
    return None


@torch.library.custom_op("thalweg::mqa_logits_ragged", mutates_args=("out",))
def _ragged(
    q: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    out: Tensor,
    implementation: str | None,
) -> None:
    dispatch.run("mqa_logits_ragged", implementation, q.device, q, keys, scales, weights, starts, ends, out)


@_ragged.register_fake
def _(q, keys, scales, weights, starts, ends, out, implementation):
    return None
