"""Scratch memory of the selection: allocated once for a device, a stream and a configuration, and used by every call there.

Its size follows the rows and programs of a launch and k, never the lengths or a ceiling. Calls on one stream follow each other, so that
they can share it; a CUDA graph that holds such calls must not be replayed on two streams at once.
"""

import functools
from dataclasses import dataclass

import torch

ROWS_AT_ONCE = 1024  # of a launch; more rows take several launches


@dataclass(frozen=True)
class Scratch:
    """Lists of candidates and what is known of each: a list a row, then `run_rows` a program."""

    list_keys: torch.Tensor  # int32 [lists, capacity]
    list_indices: torch.Tensor  # int32 [lists, capacity]
    counts: torch.Tensor  # int32 [lists]
    part_counts: torch.Tensor  # int32 [lists]
    bounds: torch.Tensor  # int32 [lists]
    fresh: torch.Tensor  # float32 [programs x rows of a run, fresh]
    arrivals: torch.Tensor  # int32 [rows]; every launch leaves it zero

    def bytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.numel() * tensor.element_size() for tensor in vars(self).values())


def scratch(device: torch.device, programs: int, run_rows: int, capacity: int, fresh: int) -> Scratch:
    """The scratch of the current stream, for ROWS_AT_ONCE rows at most. run_rows: rows of a run; fresh: scores kept before
    they are absorbed (0: none)."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _allocate(device, stream, programs, run_rows, capacity, fresh)


@functools.cache
def _allocate(device: torch.device, stream: int, programs: int, run_rows: int, capacity: int, fresh: int) -> Scratch:
    lists = ROWS_AT_ONCE + programs * run_rows

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Scratch(
        list_keys=empty(lists, capacity),
        list_indices=empty(lists, capacity),
        counts=empty(lists),
        part_counts=empty(lists),
        bounds=empty(lists),
        fresh=empty(programs * run_rows, fresh, dtype=torch.float32),
        arrivals=torch.zeros(ROWS_AT_ONCE, dtype=torch.int32, device=device),
    )
