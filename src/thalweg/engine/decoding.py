"""How a step turns logits into tokens: the strategy that plain decoding and speculation share.

A step of a decoding request computes the rows of `propose` behind the request's computed tokens, takes the logits of all
of them, and commits what `accept` returns. Plain decoding proposes the newest token alone and accepts one new token.
"""

from typing import Protocol

import torch

from thalweg.engine.request import Request
from thalweg.engine.sampler import Drawn


class Strategy(Protocol):
    """What the engine asks of a way to decode."""

    def propose(self, request: Request) -> list[int]:
        """Tokens of this step's rows: the committed ones without a row, then drafts. At least one."""

    def accept(self, request: Request, rows: list[int], logits: torch.Tensor) -> tuple[list[Drawn], int]:
        """From the logits [len(rows), vocabulary] of the proposed rows: (new tokens in order, at least one; how many of the
        rows stay in the cache, the committed tokens' rows at least)."""


class PlainDecoding:
    """One row, one token."""

    def propose(self, request: Request) -> list[int]:
        """The newest token."""
        return request.output[-1:]

    def accept(self, request: Request, rows: list[int], logits: torch.Tensor) -> tuple[list[Drawn], int]:
        """One draw from the newest token's logits."""
        return [request.sampler(logits[-1], request.prompt, request.output)], len(rows)
