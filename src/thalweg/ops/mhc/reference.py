"""Manifold-constrained hyper-connections in plain PyTorch: float64 inside, rounded at the end."""

import torch

from thalweg.ops.rotary import rms_norm


def pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block's input, and what mixes its output back: see `thalweg.ops.mhc_pre`."""
    u, post_weight, comb = _pre(streams, fn, scale, base, norm_eps, hc_eps, iterations)
    return u.to(streams.dtype), post_weight, comb


def _pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`pre` with the input still in float64: what follows in the same operation does not round it twice."""
    n = streams.shape[1]
    mixes = _mixes(streams, fn, norm_eps)
    scale, base = scale.double(), base.double()
    pre_weight = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n))
    comb = sinkhorn(logits, hc_eps, iterations)
    return _collapse(pre_weight, streams), post.float(), comb.float()


def sinkhorn(logits: torch.Tensor, hc_eps: float, iterations: int) -> torch.Tensor:
    """[T, n, n] logits to nearly doubly stochastic matrices: row softmax, then columns, then (rows, columns) in turn."""
    comb = torch.softmax(logits, dim=-1) + hc_eps
    comb /= comb.sum(dim=-2, keepdim=True) + hc_eps
    for _ in range(iterations - 1):
        comb /= comb.sum(dim=-1, keepdim=True) + hc_eps
        comb /= comb.sum(dim=-2, keepdim=True) + hc_eps
    return comb


def post(y: torch.Tensor, streams: torch.Tensor, post_weight: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_j = post_j y + sum_i comb_ij X_i: comb is contracted over its FIRST axis."""
    mixed = torch.einsum("tij,tid->tjd", comb.double(), streams.double())
    return (post_weight.double().unsqueeze(-1) * y.double().unsqueeze(1) + mixed).to(streams.dtype)


def post_pre_norm(
    y: torch.Tensor,
    streams: torch.Tensor,
    post_weight: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """post of one block, pre of the next, and the weighted RMSNorm of its input."""
    streams = post(y, streams, post_weight, comb)
    u, next_post, next_comb = _pre(streams, fn, scale, base, norm_eps, hc_eps, iterations)
    return streams, rms_norm(u, norm_weight, norm_eps).to(streams.dtype), next_post, next_comb


def head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, hc_eps: float
) -> torch.Tensor:
    """The streams collapsed before the last norm."""
    weight = torch.sigmoid(_mixes(streams, fn, norm_eps) * scale.double() + base.double()) + hc_eps
    return _collapse(weight, streams).to(streams.dtype)


def _mixes(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    return rms_norm(streams.flatten(1).double(), None, norm_eps) @ fn.double().T


def _collapse(weight: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ti,tid->td", weight, streams.double())
