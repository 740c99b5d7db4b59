"""What each training step looks like: sequence length, attention mode, learning rate."""

import math
from dataclasses import dataclass
from itertools import pairwise

from tools.tiny.dense_attention import Mode

WARM_UP = 0.02  # parts of the run: learning rate rising,
DECAY = 0.55  # falling linearly to zero at the end,
DENSE = 0.2  # attention over all visible entries while the indexer learns to follow it
LENGTHS = ((0.0, 1024), (0.55, 2048), (0.9, 4096))  # sequence length from that part of the run on
MTP_WEIGHT = 0.1
BALANCE_RATE = 2e-3  # how far a router bias moves in a step at the full learning rate


@dataclass(frozen=True)
class Schedule:
    """A run of total_steps steps of batch_tokens tokens each."""

    total_steps: int
    batch_tokens: int
    lengths: tuple[tuple[float, int], ...] = LENGTHS

    def length(self, step: int) -> int:
        """Sequence length of a step."""
        part = step / self.total_steps
        return [length for start, length in self.lengths if part >= start][-1]

    def rows(self, step: int) -> int:
        return max(1, self.batch_tokens // self.length(step))

    def mode(self, step: int) -> Mode:
        """Dense attention first; then the indexer's choice, over rows as the fp8 cache keeps them."""
        if step < DENSE * self.total_steps:
            return Mode("dense", distil=True)
        return Mode("indexer", quantise_cache=True, distil=True)

    def rate_factor(self, step: int) -> float:
        """Learning rate as a part of its peak: linear up, flat, linear down."""
        rising = (step + 1) / max(1.0, WARM_UP * self.total_steps)
        falling = (self.total_steps - step) / (DECAY * self.total_steps)
        return min(1.0, rising, falling)

    def stages(self) -> list[tuple[float, int, Mode]]:
        """(part of the run, length, mode) of every stretch of equal steps, in order; the parts sum to 1."""
        borders = sorted({0.0, DENSE, 1.0, *(start for start, _ in self.lengths)})
        out = []
        for start, end in pairwise(borders):
            step = math.ceil(start * self.total_steps)
            out.append((end - start, self.length(step), self.mode(step)))
        return out
