"""From logits to the next token: greedy, or drawn, under the request's own seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thalweg.engine.params import Sampling


@dataclass(frozen=True)
class Drawn:
    """A token, the natural log of its probability before penalties and temperature, and the most probable alternatives."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The draws of one request: its own generator, so neighbours do not change them, nor does a retraction."""

    def __init__(self, sampling: Sampling, logprobs: int | None = None) -> None:
        self.sampling, self.logprobs = sampling, logprobs
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> Drawn:
        """The next token of float32 logits [vocabulary]; equal logits: the lower id when greedy."""
        raw = logits.double().cpu()
        adjusted = penalise(raw, self.sampling, prompt, output) if self.sampling.penalised else raw
        if self.sampling.temperature == 0:
            token = int(adjusted.argmax())
        else:
            probabilities = filtered_probabilities(adjusted, self.sampling)
            token = int(torch.multinomial(probabilities, 1, generator=self.generator))
        if self.logprobs is None:
            return Drawn(token)
        logprobs = torch.log_softmax(raw, dim=0)
        values, tokens = torch.sort(logprobs, descending=True, stable=True)
        count = self.logprobs
        return Drawn(
            token,
            float(logprobs[token]),
            tuple(zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)),
        )


def penalise(logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """float64 logits [vocabulary] after the penalties of `Sampling`."""
    logits = logits.clone()
    seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.int64)
    held = logits[seen]
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(held > 0, held / penalty, held * penalty)
    counts = torch.bincount(torch.tensor(list(output), dtype=torch.int64), minlength=logits.numel()).double()
    return logits - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts


def filtered_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """float64 [vocabulary], summing to 1: temperature, then top-k, then the smallest set that reaches top-p, then min-p
    (tokens at least that fraction of the most probable)."""
    values, tokens = torch.sort(logits.double() / sampling.temperature, descending=True, stable=True)
    if sampling.top_k:
        values[sampling.top_k :] = float("-inf")
    probabilities = torch.softmax(values, dim=0)
    before = probabilities.cumsum(0) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    probabilities = probabilities.masked_fill(probabilities < sampling.min_p * probabilities[0], 0.0)
    return torch.zeros_like(probabilities).scatter(0, tokens, probabilities / probabilities.sum())
