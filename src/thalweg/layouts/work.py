"""What a step costs, counted where it happens: `with counting() as work:` around it.

The reference operations count what they really do, not a model of it; outside the context nothing is counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch


@dataclass
class Work:
    """Sums over layers and operations.

    pages_read, rows_read: distinct pages and cached rows that an operation touched, each once an operation. keys_scored:
    (query row, index key) pairs. entries_attended: (query row, cached row) pairs, window and compressed.
    """

    pages_read: int = 0
    rows_read: int = 0
    keys_scored: int = 0
    entries_attended: int = 0

    def add(self, other: "Work") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


_active: list[Work] = []


@contextmanager
def counting() -> Iterator[Work]:
    """Counts all work inside the block. Contexts may nest; each sees all work inside it."""
    work = Work()
    _active.append(work)
    try:
        yield work
    finally:
        # By identity: two counters with equal counts compare equal.
        _active[:] = [other for other in _active if other is not work]


def count_read(cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Called by every layout's read."""
    if _active:
        pages = int(torch.unique(slots.long() // cache.shape[1]).numel())
        count(Work(pages_read=pages, rows_read=slots.numel()))


def count(work: Work) -> None:
    """Adds `work` to every open count."""
    for active in _active:
        active.add(work)


def is_counting() -> bool:
    """Whether anybody counts: counting may cost a look at the data."""
    return bool(_active)
