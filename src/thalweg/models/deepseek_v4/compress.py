"""The projections in front of a compressor."""

import torch

from thalweg.models.linear import Weights
from thalweg.ops import CompressPlan, compress


class Compressor:
    """kv and gate projections, position bias, norm: entries of the main cache, or of the indexer's keys."""

    def __init__(
        self, weights: Weights, ratio: int, inverse_frequencies: torch.Tensor, *, hadamard: bool, eps: float
    ) -> None:
        self.ratio, self.hadamard, self.eps = ratio, hadamard, eps
        self.inverse_frequencies = inverse_frequencies
        self.wkv, self.wgate = weights.linear("wkv"), weights.linear("wgate")
        self.ape, self.norm = weights.take("ape").float(), weights.take("norm.weight")

    def __call__(self, x: torch.Tensor, plan: CompressPlan, state: torch.Tensor, cache: torch.Tensor) -> None:
        """x [T, D]; writes the entries that complete to `cache` and carries the open window in `state`."""
        compress(
            self.wkv(x).float(),
            self.wgate(x).float(),
            state,
            self.ape,
            plan,
            self.norm,
            self.inverse_frequencies,
            cache,
            ratio=self.ratio,
            hadamard=self.hadamard,
            eps=self.eps,
        )
