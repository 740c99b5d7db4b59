"""How the attention kernel is configured, by hardware and shape: launches and the compile suite read the same tables."""

from dataclasses import dataclass

from thalweg.layouts import mla_bf16, v4, v32
from thalweg.ops.hardware import Hardware

MOST_SPLITS = 64
SCRATCH_BYTES = 64 * 2**20  # more rows than fit take several launches


@dataclass(frozen=True)
class Choice:
    """One configuration of the attention kernel."""

    heads: int  # of a tile
    block: int  # cached rows of a tile
    warps: int
    stages: int
    resident: int  # programs that fit a multiprocessor

    def label(self) -> str:
        """For the names of variants."""
        return f"heads{self.heads}/block{self.block}/warps{self.warps}/stages{self.stages}"


# By layout: heads of a tile, cached rows of a tile, warps, stages, programs a multiprocessor.
_HOPPER = {
    v4.NAME: (Choice(16, 32, 4, 2, 2), Choice(32, 64, 8, 2, 1), Choice(64, 64, 8, 2, 1)),
    v32.NAME: (Choice(16, 32, 4, 2, 2),),
    mla_bf16.NAME: (Choice(16, 32, 4, 2, 2), Choice(32, 32, 8, 2, 1), Choice(64, 32, 8, 2, 1)),
}
# Not measured: what fits 99 KiB.
_DEFAULT = {layout: (Choice(16, 32, 8, 2, 1),) for layout in (v4.NAME, v32.NAME, mla_bf16.NAME)}
_TABLES = {"sm_90": _HOPPER}


def choose(hardware: Hardware, layout: str, heads: int) -> Choice:
    """The configuration for so many heads: the smallest tile that holds them, or the largest there is."""
    choices = all_choices(hardware, layout)
    return next((choice for choice in choices if heads <= choice.heads), choices[-1])


def all_choices(hardware: Hardware, layout: str) -> tuple[Choice, ...]:
    """Everything that `choose` can answer on this hardware, by rising number of heads."""
    return _TABLES.get(hardware.name, _DEFAULT)[layout]


# The model of a launch's time, in units of a tile of cached rows: what a program pays before its first tile, and what the
# merge costs as a launch.
_BEGIN, _MERGE = 2.0, 2.0


def splits_of(programs: int, tiles: int, resident: int, deterministic: bool) -> int:
    """Into how many parts the lists are divided, for `programs` programs a split and lists of up to `tiles` tiles.

    `resident`: programs that run at once. Deterministic: whatever the batch is, so that a row's sums have one order.
    """
    if deterministic:
        return min(MOST_SPLITS, -(-tiles // 4)) or 1
    best, least = 1, float("inf")
    for splits in range(1, min(MOST_SPLITS, max(tiles, 1)) + 1):
        waves = -(-programs * splits // resident)
        cost = waves * (_BEGIN + -(-tiles // splits)) + (_MERGE if splits > 1 else 0)
        if cost < least:
            best, least = splits, cost
    return best
