"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p under a seed."""

import math
from dataclasses import dataclass

import torch

from thalweg.errors import UserError

LOWEST_TEMPERATURE = 1e-30  # far below, a logit divided by it is no float64; long before, it is greedy


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 and top_p 1 keep every token. The seed fixes the draws of a request."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}; possible is 0 (greedy), or {LOWEST_TEMPERATURE} or more"
            )
        if self.top_k < 0:
            raise UserError(f"top-k is {self.top_k}; possible is 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}; possible is above 0, up to 1 (all tokens)")
        if not -(2**63) <= self.seed < 2**64:
            raise UserError(f"seed is {self.seed}; possible is -2^63 to 2^64 - 1")


class Sampler:
    """The draws of one request: its own generator, so neighbours do not change them."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token of float32 logits [vocabulary]; equal logits: the lower id when greedy."""
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        probabilities = filtered_probabilities(logits.cpu(), self.sampling)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def filtered_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """float64 [vocabulary], summing to 1: temperature first, then top-k, then the smallest set that reaches top-p."""
    values, tokens = torch.sort(logits.double() / sampling.temperature, descending=True, stable=True)
    if sampling.top_k:
        values[sampling.top_k :] = float("-inf")
    probabilities = torch.softmax(values, dim=0)
    before = probabilities.cumsum(0) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return torch.zeros_like(probabilities).scatter(0, tokens, probabilities / probabilities.sum())
