"""What reading the caches costs, counted where it happens: `with counting() as traffic:` around a step.

The counts are of real reads by the reference operations, not a model of them; nothing is counted outside the context.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Traffic:
    """Rows read (a row read twice counts twice), and distinct pages touched, summed over reads."""

    rows: int = 0
    pages: int = 0


_active: list[Traffic] = []


@contextmanager
def counting() -> Iterator[Traffic]:
    """Counts every cache read inside the block. Contexts may nest; each sees all reads inside it."""
    traffic = Traffic()
    _active.append(traffic)
    try:
        yield traffic
    finally:
        # By identity: two counters with equal counts compare equal.
        _active[:] = [other for other in _active if other is not traffic]


def count(cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Called by every layout's read."""
    if _active:
        pages = int(torch.unique(slots.long() // cache.shape[1]).numel())
        for traffic in _active:
            traffic.rows += slots.numel()
            traffic.pages += pages
