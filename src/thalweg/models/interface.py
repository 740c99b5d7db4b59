"""What the engine asks of a model, whichever family it is of."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from thalweg.models.batch import RowBatch


@dataclass(frozen=True)
class PoolSizes:
    """How much cache is allocated, page 0 and state slot 0 (never handed out) included."""

    pages: int
    """logical pages of 256 tokens"""
    window_pages: int
    """window pages of 256 tokens; 0 for a model without a window"""
    state_slots: int
    """requests whose open compressor windows are held; 0 for a model without compressors"""


class Model(Protocol):
    """A model over paged caches. `Any` is the family's own kind of caches: what `allocate` gives, `forward` takes."""

    @property
    def config(self) -> Any:
        """At least vocab_size, max_position_embeddings, bos_token_id and eos_token_ids."""

    @property
    def device(self) -> torch.device: ...

    @property
    def kv_layouts(self) -> tuple[str, ...]:
        """What `allocate` takes, the one to serve with first."""

    @property
    def window(self) -> int | None:
        """Tokens that stay in window pages behind the newest, itself included; None for a model without a window."""

    def pool_bytes(self, pool: PoolSizes, kv_layout: str) -> int:
        """What `allocate` takes of memory, in bytes."""

    def allocate(self, pool: PoolSizes, kv_layout: str) -> Any:
        """Zeroed caches on the model's device."""

    def carry_out(self, caches: Any, state_slot: int) -> Any:
        """A copy of what a request carries outside its pages, at a multiple of 256 tokens."""

    def carry_in(self, caches: Any, state_slot: int, carried: Any) -> None:
        """Gives a request what `carry_out` copied from one with the same tokens."""

    def forward(self, batch: RowBatch, caches: Any) -> torch.Tensor:
        """Hidden states [T, ...] after the last layer; writes the rows into the caches."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of rows of what `forward` returned."""
