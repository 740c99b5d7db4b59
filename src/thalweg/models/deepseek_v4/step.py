"""What every layer of a step needs to know of its rows: where to write, what to attend. Computed once a step."""

from dataclasses import dataclass
from functools import cached_property

import torch

from thalweg.layouts.sizes import LOGICAL_PAGE_TOKENS
from thalweg.models.batch import RowBatch
from thalweg.models.config_deepseek_v4 import CSA, HCA
from thalweg.models.deepseek_v4.caches import page_slots
from thalweg.ops import CompressPlan


@dataclass(frozen=True)
class Step:
    """A RowBatch with the addresses that follow from it. `window` = tokens a row sees directly, itself included."""

    batch: RowBatch
    window: int

    @cached_property
    def window_slots(self) -> torch.Tensor:
        """int64 [T]: where each row's own latent goes."""
        return self._window_slot(self.batch.positions.unsqueeze(1)).squeeze(1)

    @cached_property
    def window_indices(self) -> torch.Tensor:
        """int64 [T, window]: slots of the last `window` tokens, -1 before the first."""
        back = torch.arange(self.window - 1, -1, -1, device=self.batch.positions.device)
        return self._window_slot(self.batch.positions.unsqueeze(1) - back)

    @cached_property
    def c4_lengths(self) -> torch.Tensor:
        """int64 [T]: c4 entries that each row may see."""
        return (self.batch.positions + 1) // CSA

    @cached_property
    def c4_plan(self) -> CompressPlan:
        return self._plan(CSA)

    @cached_property
    def c128_plan(self) -> CompressPlan:
        return self._plan(HCA)

    @cached_property
    def c128_indices(self) -> torch.Tensor:
        """int64 [T, most visible]: slots of every c128 entry that each row may see, -1 past them."""
        lengths = (self.batch.positions + 1) // HCA
        entries = torch.arange(int(lengths.max()), device=lengths.device).expand(lengths.numel(), -1)
        slots = self._compressed_slot(entries, HCA)
        return torch.where(entries < lengths.unsqueeze(1), slots, -1)

    def _plan(self, ratio: int) -> CompressPlan:
        positions = self.batch.positions
        completed = positions % ratio == ratio - 1
        slots = self._compressed_slot((positions // ratio).unsqueeze(1), ratio).squeeze(1)
        state_slots = self.batch.state_slots[self.batch.row_to_request]
        return CompressPlan(positions, state_slots, torch.where(completed, slots, -1))

    def _compressed_slot(self, entries: torch.Tensor, ratio: int) -> torch.Tensor:
        slots = page_slots(ratio)
        page = self.batch.page_table[self.batch.row_to_request.unsqueeze(1), entries // slots]
        return torch.where(page >= 0, page * slots + entries % slots, -1)

    def _window_slot(self, positions: torch.Tensor) -> torch.Tensor:
        known = positions.clamp(min=0)
        page = self.batch.window_table[self.batch.row_to_request.unsqueeze(1), known // LOGICAL_PAGE_TOKENS]
        slot = page * LOGICAL_PAGE_TOKENS + known % LOGICAL_PAGE_TOKENS
        return torch.where((positions >= 0) & (page >= 0), slot, -1)
