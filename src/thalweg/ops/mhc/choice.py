"""How the two launches are configured, by rows and width: launches and the compile suite read the same tables.

Nothing here was measured: see versions.md beside this file.
"""

from dataclasses import dataclass

MOST_SPLITS = 128
PROGRAMS = 2  # of the first launch a multiprocessor, where there is work for so many
WIDTHS = (1024, 4096, 8192)  # channels of a row at once, in the second launch
_BYTES_A_THREAD = 256  # of a row's streams: 64 registers


@dataclass(frozen=True)
class Choice:
    """Tiles of the first launch, and how the second adds up its splits."""

    rows: int  # of a tile
    block: int  # channels that a program mixes at once
    warps: int
    splits: int  # most there may be, a power of two: the second launch reads them at once
    mixers: int  # rows of a program that finds post and comb

    def label(self) -> str:
        """For the names of variants."""
        return f"rows{self.rows}/block{self.block}/warps{self.warps}"


# By rising number of rows. Few rows: short shares of the channels, so that the weights are read by the whole card.
_FEW = Choice(16, 32, 4, MOST_SPLITS, 1)
_SOME = Choice(64, 32, 4, MOST_SPLITS, 1)
_MANY = Choice(64, 32, 4, 64, 2)
_ALL = Choice(64, 32, 4, 4, 8)  # row tiles alone fill the card: as many splits as even it out
# Float32 streams are what comparisons run on: three times the operands in registers, so always the small tile.
_WIDE_MANY = Choice(16, 32, 4, 64, 2)
_WIDE_ALL = Choice(16, 32, 4, 4, 8)


def choose(rows: int, element_size: int, multiprocessors: int) -> Choice:
    """The configuration for so many rows of streams of so many bytes an element."""
    few, some, many, everything = all_choices(element_size)
    if rows <= few.rows:
        return few
    if rows <= _SOME.rows:
        return some
    tiles = -(-rows // many.rows)
    return many if tiles * everything.splits < PROGRAMS * multiprocessors else everything


def all_choices(element_size: int) -> tuple[Choice, Choice, Choice, Choice]:
    """Everything that `choose` can answer, by rising number of rows."""
    return (_FEW, _SOME, _MANY, _ALL) if element_size == 2 else (_FEW, _FEW, _WIDE_MANY, _WIDE_ALL)


def share_of(choice: Choice, rows: int, width: int, multiprocessors: int) -> int:
    """Channels of a split: a multiple of the block, and few enough for PROGRAMS a multiprocessor, or a block each."""
    blocks = -(-width // choice.block)
    tiles = -(-rows // choice.rows)
    splits = max(1, min(choice.splits, blocks, PROGRAMS * multiprocessors // max(1, tiles)))
    return -(-blocks // splits) * choice.block


def width_of(width: int) -> int:
    """Channels that a program of the second launch holds at once: all of them, or the most there are."""
    return next((each for each in WIDTHS if width <= each), WIDTHS[-1])


def warps_of(width: int, element_size: int) -> int:
    """Warps of the second launch for rows of `width_of` channels."""
    return max(4, width * 4 * element_size // (32 * _BYTES_A_THREAD))
