"""Scratch memory of the selection: allocated once for a device, a stream and a size, and used by every call there.

Its size follows the rows of a launch alone: 224 KiB a row, never a length or a ceiling. Calls on one stream follow each other,
so that they can share it; CUDA graphs that hold such calls must not be replayed on two streams at once.
"""

import functools
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

    def bytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.numel() * tensor.element_size() for tensor in vars(self).values())


def scratch(device: torch.device, rows: int) -> Scratch:
    """The scratch of the current stream for `rows` rows, ROWS_AT_ONCE at most."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _allocate(device, stream, 1 << max(3, (rows - 1).bit_length()))


@functools.cache
def _allocate(device: torch.device, stream: int, rows: int) -> Scratch:
    def empty(width: int) -> torch.Tensor:
        return torch.empty((rows, width), dtype=torch.int32, device=device)

    return Scratch(empty(DENSE), empty(GROUPS), empty(GROUPS), empty(CAPACITY), empty(CAPACITY))
