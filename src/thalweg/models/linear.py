"""Matrix products of the models, and the batch-invariant mode.

A float32 product of 1 row differs from the same row among 64 in most elements, because libraries choose another order of
summation. In batch-invariant mode products accumulate in float64 and round once: a row then gives the same float32 result in
any batch, but for results within about 1e-15 of a rounding boundary. It is the default on the CPU; weights take 8 bytes each.
"""

import torch
from torch.nn import functional


class Linear:
    """y = x W^T + b. weight [out, in], bias [out] or None; x [..., in] float32 or bf16 -> [..., out] in x's dtype."""

    def __init__(self, weight: torch.Tensor, batch_invariant: bool, bias: torch.Tensor | None = None) -> None:
        self.weight = weight.double() if batch_invariant else weight
        self.bias = bias.to(self.weight.dtype) if bias is not None else None
        self.batch_invariant = batch_invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.batch_invariant:
            return functional.linear(x.double(), self.weight, self.bias).to(x.dtype)
        return functional.linear(x, self.weight, self.bias)


class GroupedLinear:
    """One product per group of channels: weight [groups x out, in], x [T, groups, in] -> [T, groups, out]."""

    def __init__(self, weight: torch.Tensor, groups: int, batch_invariant: bool) -> None:
        grouped = weight.unflatten(0, (groups, -1))
        self.weight = grouped.double() if batch_invariant else grouped
        self.batch_invariant = batch_invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double() if self.batch_invariant else x
        return torch.einsum("tgi,goi->tgo", wide, self.weight).to(x.dtype)


class Weights:
    """Tensors by canonical name, each taken once: what is left over at the end was not understood.

    `scope(prefix)` looks at a part of them. dtype is what activations have; batch_invariant chooses the mode of every Linear
    made here (load float64 tensors then, and no copy is made).
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], dtype: torch.dtype, batch_invariant: bool, prefix: str = ""
    ) -> None:
        self.tensors = tensors
        self.dtype = dtype
        self.batch_invariant = batch_invariant
        self.prefix = prefix

    def scope(self, prefix: str) -> "Weights":
        """The weights below `prefix`, from the same pool."""
        return Weights(self.tensors, self.dtype, self.batch_invariant, f"{self.prefix}{prefix}.")

    def take(self, name: str) -> torch.Tensor:
        """The tensor `name` as loaded, removed from the pool."""
        return self.tensors.pop(self.prefix + name)

    def linear(self, name: str, *, bias: bool = False) -> Linear:
        """`name`.weight, with bias also `name`.bias, as a Linear, removed from the pool."""
        return Linear(self.take(f"{name}.weight"), self.batch_invariant, self.take(f"{name}.bias") if bias else None)

    def embedding(self, name: str) -> torch.Tensor:
        """`name`.weight [vocabulary, D] in the activations' dtype, removed from the pool."""
        return self.take(f"{name}.weight").to(self.dtype)
