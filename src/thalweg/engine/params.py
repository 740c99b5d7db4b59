"""What a request asks for: how tokens are drawn, when to stop, what to report."""

import math
from dataclasses import dataclass

from thalweg.errors import UserError

MAX_LOGPROBS = 20
LOWEST_TEMPERATURE = 1e-30  # far below, a logit divided by it is no float64; long before, it is greedy


def _within(name: str, value: float, low: float, high: float, possible: str) -> None:
    if not low <= value <= high or value == math.inf:
        raise UserError(f"{name} is {value}; possible is {possible}")


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 keep every token. The seed fixes the draws of a request.

    repetition_penalty (1 = none) divides positive and multiplies negative logits of tokens in prompt or output;
    presence_penalty and frequency_penalty (0 = none) are subtracted once, and per occurrence, for tokens in the output.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}; possible is 0 (greedy), or {LOWEST_TEMPERATURE} or more"
            )
        _within("top-k", self.top_k, 0, math.inf, "0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}; possible is above 0, up to 1 (all tokens)")
        _within("min-p", self.min_p, 0, 1, "0 (all tokens) to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(f"repetition-penalty is {self.repetition_penalty}; possible is above 0, 1 is none")
        _within("presence-penalty", self.presence_penalty, -2, 2, "-2 to 2, 0 is none")
        if not -(2**63) <= self.seed < 2**64:
            raise UserError(f"seed is {self.seed}; possible is -2^63 to 2^64 - 1")
        _within("frequency-penalty", self.frequency_penalty, -2, 2, "-2 to 2, 0 is none")

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Params:
    """max_tokens: new tokens at most. stop: strings that end the text and are not part of it. stop_token_ids: tokens that
    end it, beside the model's own end-of-text tokens unless ignore_eos. logprobs: None, or how many alternatives to report
    with each token."""

    sampling: Sampling = Sampling()
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max-tokens is {self.max_tokens}; possible is 1 or more")
        if "" in self.stop:
            raise UserError("a stop string is empty; leave it out or give at least one character")
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
