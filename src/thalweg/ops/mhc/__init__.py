"""Manifold-constrained hyper-connections (mHC): n = 4 residual streams, mixed before and after every block.

With r = rsqrt(mean(vec(X)^2) + norm_eps) and m = r (F vec(X)): pre = sigmoid(s0 m + b) + eps, post = 2 sigmoid(s1 m + b),
comb = the 4 x 4 rest through Sinkhorn. Source: the DeepSeek-V4 technical report, section 2.2.
"""

import torch
from torch import Tensor

from thalweg.ops import dispatch
from thalweg.ops.checks import FLOATING, check_same_device, check_tensor, require
from thalweg.ops.hardware import on_first_call, triton_unproven, triton_unsupported
from thalweg.ops.mhc import reference

_KERNELS = "thalweg.ops.mhc.triton"

for _function in (reference.pre, reference.post, reference.post_pre_norm, reference.head):
    _name = _function.__name__
    dispatch.register(
        f"mhc_{_name}",
        "triton",
        on_first_call(_KERNELS, _name),
        triton_unsupported,
        triton_unproven,
        on_first_call(_KERNELS, f"{_name}_rejects"),
    )
    dispatch.register(f"mhc_{_name}", "reference", _function)


def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    iterations: int = 20,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input of a block and the weights that mix its output back.

    streams [T, n, D] float32, bf16 or float64; fn float32 [n (2 + n), n D]; scale float32 [3]; base float32 [n (2 + n)].
    Returns (u [T, D] in streams' dtype, post float32 [T, n], comb float32 [T, n, n]); T = 0 gives empty results.
    Raises ValueError for shapes that do not fit.
    """
    _check_streams(streams)
    n = streams.shape[1]
    _check_mixer(streams, fn, scale, base, (2 + n) * n, 3)
    require(iterations >= 1, f"iterations: got {iterations}, needs at least 1")
    return _pre(streams, fn, scale, base, norm_eps, hc_eps, iterations, implementation)


def mhc_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """X'_j = post_j y + sum_i comb_ij X_i.

    y [T, D] (the block's output), streams [T, n, D], post float32 [T, n], comb float32 [T, n, n] -> [T, n, D] in streams'
    dtype. Raises ValueError for shapes that do not fit.
    """
    _check_post(y, streams, post, comb)
    return _post(y, streams, post, comb, implementation)


def mhc_post_pre_norm(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    iterations: int = 20,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mhc_post` of one block, `mhc_pre` of the next and the RMSNorm (weight [D]) of the next block's input, in one.

    Returns (X' [T, n, D], normalised u' [T, D], post' float32 [T, n], comb' float32 [T, n, n]). Arguments as in the two.
    """
    _check_post(y, streams, post, comb)
    n, width = streams.shape[1], streams.shape[2]
    _check_mixer(streams, fn, scale, base, (2 + n) * n, 3)
    check_tensor("norm_weight", norm_weight, (width,), FLOATING)
    check_same_device(streams=streams, norm_weight=norm_weight)
    require(iterations >= 1, f"iterations: got {iterations}, needs at least 1")
    args = (y, streams, post, comb, fn, scale, base, norm_weight, norm_eps, hc_eps, iterations)
    return _post_pre_norm(*args, implementation)


def mhc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    implementation: str | None = None,
) -> torch.Tensor:
    """The streams collapsed into one before the model's last norm: pre alone, with weights of its own.

    streams [T, n, D]; fn float32 [n, n D]; scale float32 [1]; base float32 [n] -> [T, D] in streams' dtype.
    """
    _check_streams(streams)
    _check_mixer(streams, fn, scale, base, streams.shape[1], 1)
    return _head(streams, fn, scale, base, norm_eps, hc_eps, implementation)


def _check_streams(streams: torch.Tensor) -> None:
    check_tensor("streams", streams, (None, None, None), (torch.float32, torch.bfloat16, torch.float64))


def _check_mixer(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rows: int, scales: int
) -> None:
    check_tensor("fn", fn, (rows, streams.shape[1] * streams.shape[2]), (torch.float32,))
    check_tensor("scale", scale, (scales,), (torch.float32,))
    check_tensor("base", base, (rows,), (torch.float32,))
    check_same_device(streams=streams, fn=fn, scale=scale, base=base)


def _check_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    _check_streams(streams)
    rows, n, width = streams.shape
    check_tensor("y", y, (rows, width))
    check_tensor("post", post, (rows, n))
    check_tensor("comb", comb, (rows, n, n))
    check_same_device(y=y, streams=streams, post=post, comb=comb)


@torch.library.custom_op("thalweg::mhc_pre", mutates_args=())
def _pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    implementation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    args = (streams, fn, scale, base, norm_eps, hc_eps, iterations)
    return dispatch.run("mhc_pre", implementation, streams.device, *args)


@_pre.register_fake
def _(streams, fn, scale, base, norm_eps, hc_eps, iterations, implementation):
    rows, n, width = streams.shape
    mixing = streams.new_empty((rows, n), dtype=torch.float32)
    return streams.new_empty((rows, width)), mixing, mixing.new_empty((rows, n, n))


@torch.library.custom_op("thalweg::mhc_post", mutates_args=())
def _post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, implementation: str | None) -> Tensor:
    return dispatch.run("mhc_post", implementation, streams.device, y, streams, post, comb)


@_post.register_fake
def _(y, streams, post, comb, implementation):
    return torch.empty_like(streams)


@torch.library.custom_op("thalweg::mhc_post_pre_norm", mutates_args=())
def _post_pre_norm(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    implementation: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = (y, streams, post, comb, fn, scale, base, norm_weight, norm_eps, hc_eps, iterations)
    return dispatch.run("mhc_post_pre_norm", implementation, streams.device, *args)


@_post_pre_norm.register_fake
def _(y, streams, post, comb, fn, scale, base, norm_weight, norm_eps, hc_eps, iterations, implementation):
    return torch.empty_like(streams), torch.empty_like(y), torch.empty_like(post), torch.empty_like(comb)


@torch.library.custom_op("thalweg::mhc_head", mutates_args=())
def _head(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    implementation: str | None,
) -> Tensor:
    return dispatch.run("mhc_head", implementation, streams.device, streams, fn, scale, base, norm_eps, hc_eps)


@_head.register_fake
def _(streams, fn, scale, base, norm_eps, hc_eps, implementation):
    return streams.new_empty((streams.shape[0], streams.shape[2]))
