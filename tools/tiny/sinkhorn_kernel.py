"""Sinkhorn normalisation of many small matrices, forward and backward, one Triton kernel each.

Grid: one program per BLOCK matrices, whole matrices [BLOCK, n, n] in registers, all iterations inside. Each half
iteration is y = x / s with s = sum(x) + eps along one axis. The forward pass keeps every s; the backward pass walks
back from the result with x = y * s and dx = (dy - sum(dy * y)) / s, so no intermediate matrix is stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


@triton.jit
def _forward(logits, out, sums, rows, eps, iterations: tl.constexpr, n: tl.constexpr, block: tl.constexpr):
    row = (tl.program_id(0) * block + tl.arange(0, block))[:, None, None]
    i = tl.arange(0, n)[None, :, None]
    j = tl.arange(0, n)[None, None, :]
    inside = row < rows
    place = (row * n + i) * n + j
    x = tl.load(logits + place, mask=inside, other=0.0)
    x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
    x = x / tl.sum(x, axis=2, keep_dims=True) + eps
    s = tl.sum(x, axis=1, keep_dims=True) + eps
    tl.store(sums + row * n + j, s, mask=inside)
    x = x / s
    for k in range(1, iterations):
        s = tl.sum(x, axis=2, keep_dims=True) + eps
        tl.store(sums + ((2 * k - 1) * rows + row) * n + i, s, mask=inside)
        x = x / s
        s = tl.sum(x, axis=1, keep_dims=True) + eps
        tl.store(sums + (2 * k * rows + row) * n + j, s, mask=inside)
        x = x / s
    tl.store(out + place, x, mask=inside)


@triton.jit
def _backward(grad, out, sums, grad_logits, rows, eps, iterations: tl.constexpr, n: tl.constexpr, block: tl.constexpr):
    row = (tl.program_id(0) * block + tl.arange(0, block))[:, None, None]
    i = tl.arange(0, n)[None, :, None]
    j = tl.arange(0, n)[None, None, :]
    inside = row < rows
    place = (row * n + i) * n + j
    y = tl.load(out + place, mask=inside, other=0.0)
    dy = tl.load(grad + place, mask=inside, other=0.0)
    for back in range(1, iterations):
        k = iterations - back
        s = tl.load(sums + (2 * k * rows + row) * n + j, mask=inside, other=1.0)
        dy = (dy - tl.sum(dy * y, axis=1, keep_dims=True)) / s
        y = y * s
        s = tl.load(sums + ((2 * k - 1) * rows + row) * n + i, mask=inside, other=1.0)
        dy = (dy - tl.sum(dy * y, axis=2, keep_dims=True)) / s
        y = y * s
    s = tl.load(sums + row * n + j, mask=inside, other=1.0)
    dy = (dy - tl.sum(dy * y, axis=1, keep_dims=True)) / s
    softmax = y * s - eps
    dx = softmax * (dy - tl.sum(dy * softmax, axis=2, keep_dims=True))
    tl.store(grad_logits + place, dx, mask=inside)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, iterations: int, eps: float) -> Tensor:
        rows, n, _ = logits.shape
        logits = logits.contiguous()
        out = torch.empty_like(logits)
        sums = logits.new_empty(2 * iterations - 1, rows, n)
        _forward[(triton.cdiv(rows, BLOCK),)](logits, out, sums, rows, eps, iterations, n, BLOCK)
        ctx.save_for_backward(out, sums)
        ctx.iterations, ctx.eps = iterations, eps
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        out, sums = ctx.saved_tensors
        rows, n, _ = out.shape
        grad_logits = torch.empty_like(out)
        grid = (triton.cdiv(rows, BLOCK),)
        _backward[grid](grad.contiguous(), out, sums, grad_logits, rows, ctx.eps, ctx.iterations, n, BLOCK)
        return grad_logits, None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """What dense_parts.sinkhorn computes, for float32 logits [rows, n, n] on a GPU, n a power of two."""
    return _Sinkhorn.apply(logits, iterations, eps)
