"""Scratch memory of the selection: 224 KiB a row of a launch, whatever the rows' lengths and the ceiling.

Taken from torch's allocator at every call and given back: calls on different streams and in different CUDA graphs never share
it, and nothing stays behind. Nothing in it needs to be zero.
"""

from dataclasses import dataclass

import torch

ROWS_AT_ONCE = 256  # of a launch at most; more rows take several launches
DENSE = 32_768  # keys of a row, or maxima of groups where it has more entries
GROUP = 4  # of those whose maximum is kept
GROUPS = DENSE // GROUP
CAPACITY = 4096  # candidates that are held in registers


@dataclass(frozen=True)
class Scratch:
    """By row: keys of all entries, or of groups of entries; maxima of GROUP of those; chosen groups; a list of candidates."""

    dense: torch.Tensor  # int32 [rows, DENSE]
    maxima: torch.Tensor  # int32 [rows, GROUPS]
    chosen: torch.Tensor  # int32 [rows, GROUPS]
    list_keys: torch.Tensor  # int32 [rows, CAPACITY]
    list_indices: torch.Tensor  # int32 [rows, CAPACITY]


def scratch(device: torch.device, rows: int) -> Scratch:
    """Scratch for a launch of `rows` rows, ROWS_AT_ONCE at most."""
    widths = (DENSE, GROUPS, GROUPS, CAPACITY, CAPACITY)
    memory = torch.empty(rows * sum(widths), dtype=torch.int32, device=device)
    return Scratch(*(part.view(rows, -1) for part in memory.split([rows * width for width in widths])))
