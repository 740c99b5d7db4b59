"""What the compressor must know of each row: where it stands, where its state lies, where a finished entry goes."""

from dataclasses import dataclass

import torch

from thalweg.ops.checks import check_tensor, require


@dataclass(frozen=True)
class CompressPlan:
    """Rows of one request are adjacent and in order of position, each position once.

    positions int [T]; state_slots int [T], the request's row of the state; cache_slots int [T], the slot for the entry that
    this row completes, -1 where it completes none or where the entry is not to be stored. A row with state_slot -1 is
    padding: it neither reads nor writes anything.
    """

    positions: torch.Tensor
    state_slots: torch.Tensor
    cache_slots: torch.Tensor

    def check(self, rows: int) -> None:
        """Raises ValueError unless every field is an int tensor [rows]."""
        for name in ("positions", "state_slots", "cache_slots"):
            check_tensor(f"plan.{name}", getattr(self, name), (rows,), (torch.int32, torch.int64))


def overlap_of(ratio: int) -> int:
    """Rows that an entry pools: c4 overlaps its predecessor (8), c128 does not (128)."""
    require(ratio in (4, 128), f"compress ratio: got {ratio}, possible are 4 and 128")
    return 8 if ratio == 4 else 128
