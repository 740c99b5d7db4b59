"""The mixture of experts of DeepSeek-V4: scored or hash routing, routed experts, one shared expert."""

import torch
from torch.nn import functional

from thalweg.errors import UserError
from thalweg.models.config_deepseek_v4 import DeepseekV4Config
from thalweg.models.linear import Linear, Weights
from thalweg.models.moe import SwiGlu, routed_sum


class Experts:
    """Weights under `layers.N.ffn`. Hash layers choose experts by token id; the weights are scored all the same."""

    def __init__(self, config: DeepseekV4Config, hash_routed: bool, weights: Weights) -> None:
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.scoring, self.normalise = config.scoring_func, config.norm_topk_prob
        # Routing is in float32 whatever the model's dtype: a rounded score chooses other experts.
        self.gate = Linear(weights.take("gate.weight").float(), weights.batch_invariant)
        self.token_experts = _token_experts(config, weights) if hash_routed else None
        self.bias = None if hash_routed else weights.take("gate.bias").float()
        self.shared = _swiglu(weights.scope("shared_experts"), config.swiglu_limit)
        self.experts = [
            _swiglu(weights.scope(f"experts.{expert}"), config.swiglu_limit) for expert in range(config.num_experts)
        ]

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """x [T, D], tokens int64 [T] -> [T, D]."""
        chosen, weights = self.route(x, tokens)
        return routed_sum(x, self.experts, chosen, weights) + self.shared(x)

    def route(self, x: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(experts int64 [T, k], weights float32 [T, k]). Equal scores: lower expert first."""
        # In float64: on the CPU float32 functions give a row other bits in a vector's tail than in its middle.
        scores = _score(self.gate(x.float()).double(), self.scoring)
        if self.token_experts is not None:
            chosen = self.token_experts[tokens]
        else:
            assert self.bias is not None
            order = torch.sort(scores + self.bias, dim=1, descending=True, stable=True).indices
            chosen = order[:, : self.top_k]
        weights = scores.gather(1, chosen)
        if self.normalise:
            weights = weights / weights.sum(dim=1, keepdim=True)
        return chosen, (weights * self.scaling).float()


def _token_experts(config: DeepseekV4Config, weights: Weights) -> torch.Tensor:
    """int64 [vocabulary, k]: the experts of every token. UserError where a checkpoint names one that is not there."""
    table = weights.take("gate.tid2eid").long()
    if bool(((table < 0) | (table >= config.num_experts)).any()):
        raise UserError(
            f"{weights.prefix}gate.tid2eid holds experts {int(table.min())} to {int(table.max())}: "
            f"this model's are 0 to {config.num_experts - 1}; the checkpoint is damaged"
        )
    return table


def _score(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "sqrtsoftplus":
        return functional.softplus(logits).sqrt()
    return logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=1)


def _swiglu(weights: Weights, limit: float | None) -> SwiGlu:
    return SwiGlu(weights.linear("w1"), weights.linear("w3"), weights.linear("w2"), limit)
