"""The mixture of experts of DeepSeek-V3: sigmoid scores, a bias for choosing only, choice among the best groups."""

import torch

from thalweg.models.config_mla import MlaConfig
from thalweg.models.linear import Linear, Weights
from thalweg.models.moe import SwiGlu, routed_sum


class Experts:
    """Weights under `model.layers.N.mlp` of the layers with experts."""

    def __init__(self, config: MlaConfig, weights: Weights) -> None:
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.normalise = config.norm_topk_prob
        self.groups, self.top_groups = config.n_group, config.topk_group
        # Routing is in float32 whatever the model's dtype: a rounded score chooses other experts.
        self.gate = Linear(weights.take("gate.weight").float(), weights.batch_invariant)
        self.bias = weights.take("gate.e_score_correction_bias").float()
        self.shared = swiglu(weights.scope("shared_experts"))
        self.experts = [swiglu(weights.scope(f"experts.{expert}")) for expert in range(config.n_routed_experts)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] -> [T, D]."""
        chosen, weights = self.route(x)
        return routed_sum(x, self.experts, chosen, weights) + self.shared(x)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(experts int64 [T, k], weights float32 [T, k]). Equal scores: lower group, lower expert first.

        A group scores by the sum of its two best experts; experts outside the best `topk_group` groups cannot be chosen.
        """
        # float64: the float32 sigmoid of a row differs with its place in the batch, in vector and remainder loops.
        scores = torch.sigmoid(self.gate(x.float()).double()).float()
        biased = scores + self.bias
        if self.groups > 1:
            grouped = biased.unflatten(1, (self.groups, -1))
            kept = _highest(grouped.topk(2, dim=-1).values.sum(dim=-1), self.top_groups)
            outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter(1, kept, False)
            biased = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
        chosen = _highest(biased, self.top_k)
        weights = scores.gather(1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return chosen, weights * self.scaling


def _highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices int64 [T, k] of the k highest of each row, the lower index first among equals."""
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]


def swiglu(weights: Weights) -> SwiGlu:
    """A SwiGLU under the released names."""
    return SwiGlu(weights.linear("gate_proj"), weights.linear("up_proj"), weights.linear("down_proj"), None)
