"""Mixture of experts: SwiGLU experts, and the sum of the routed ones."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from thalweg.models.linear import Linear


class SwiGlu:
    """down(silu(gate x) * up x), with DeepSeek-V4's clip: gate from above at `limit`, up at both sides; None = no clip."""

    def __init__(self, gate: Linear, up: Linear, down: Linear, limit: float | None) -> None:
        self.gate, self.up, self.down, self.limit = gate, up, down, limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] -> [T, D]."""
        gate, up = self.gate(x), self.up(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.down.batch_invariant:
            # On the CPU a float32 silu gives a row other bits in a vector's tail than in its middle.
            return self.down((functional.silu(gate.double()) * up).to(x.dtype))
        return self.down(functional.silu(gate) * up)


def routed_sum(x: torch.Tensor, experts: Sequence[SwiGlu], chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum over a row's chosen experts of weight x expert(x): x [T, D], chosen int [T, k], weights [T, k] -> [T, D].

    Only experts that a row chose run. A row's sum goes by expert number, in float64, whatever its neighbours chose.
    """
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in torch.unique(chosen).tolist():
        row, place = (chosen == expert).nonzero(as_tuple=True)
        total[row] += experts[expert](x[row]).double() * weights[row, place].double().unsqueeze(-1)
    return total.to(x.dtype)
