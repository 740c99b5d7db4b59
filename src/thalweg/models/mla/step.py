"""What every layer of a step needs to know of its rows: where to write, what to attend. Computed once a step."""

from dataclasses import dataclass
from functools import cached_property

import torch

from thalweg.layouts.sizes import LOGICAL_PAGE_TOKENS, pages_for
from thalweg.models.batch import RowBatch


@dataclass(frozen=True)
class RowGroup:
    """The requests of a step that have the same number of rows: one call of `mla_verify`, without padding."""

    rows: torch.Tensor
    """int64 [B, N], numbers of the step's rows"""
    page_table: torch.Tensor
    """int64 [B, W], as wide as the longest of these requests"""
    prefix_lengths: torch.Tensor
    """int64 [B], tokens before the first row"""
    parents: torch.Tensor
    """int64 [B, N]: a chain"""


@dataclass(frozen=True)
class Step:
    """A RowBatch with the addresses that follow from it. Rows of a request are at consecutive positions."""

    batch: RowBatch

    @cached_property
    def slots(self) -> torch.Tensor:
        """int64 [T]: where each row's own latent goes, -1 where its request has no page."""
        positions = self.batch.positions
        page = self.batch.page_table[self.batch.row_to_request, positions // LOGICAL_PAGE_TOKENS]
        return torch.where(page >= 0, page * LOGICAL_PAGE_TOKENS + positions % LOGICAL_PAGE_TOKENS, -1)

    @cached_property
    def groups(self) -> list[RowGroup]:
        """A decode step is one group, a prefill chunk one; a mixed step has one for each number of rows in it."""
        requests, counts = torch.unique_consecutive(self.batch.row_to_request, return_counts=True)
        first = counts.cumsum(0) - counts
        return [self._group(requests, first, counts == count, count) for count in torch.unique(counts).tolist()]

    def _group(self, requests: torch.Tensor, first: torch.Tensor, members: torch.Tensor, count: int) -> RowGroup:
        node = torch.arange(count, device=first.device)
        prefix_lengths = self.batch.positions[first[members]]
        pages = pages_for(int(prefix_lengths.max()) + count, LOGICAL_PAGE_TOKENS)
        return RowGroup(
            rows=first[members].unsqueeze(1) + node,
            page_table=self.batch.page_table[requests[members], :pages],
            prefix_lengths=prefix_lengths,
            parents=(node - 1).expand(prefix_lengths.numel(), count),
        )
