"""How the attention kernel is configured, by hardware and shape: launches and the compile suite read the same tables.

To edit a table from measurements, see versions.md beside this file; `thalweg kernels tune` measures a card and writes one.
"""

import functools
from dataclasses import asdict, dataclass, fields
from typing import Any

from thalweg.errors import UserError
from thalweg.layouts import mla_bf16, v4, v32
from thalweg.ops import tables
from thalweg.ops.hardware import Hardware, triton_version

ROOM = "sparse_mla"

MOST_SPLITS = 64
# Partial results of a head that are merged by programs which wait for them, where the card allows that. More are merged faster
# by programs that are launched later and spread over all multiprocessors: 16 rows x 64 heads x 5 splits 19.3 us for 22.5.
MOST_OVERLAPPED = 4096
SCRATCH_BYTES = 64 * 2**20  # more rows than fit take several launches


@dataclass(frozen=True)
class Choice:
    """One configuration of the attention kernel."""

    heads: int  # of a tile: a power of two, 16 at least
    block: int  # cached rows of a tile
    warps: int
    stages: int  # 2: rows a tile ahead; 3: the list's entries another one
    resident: int  # programs that fit a multiprocessor at once
    max_registers: int | None = None

    def label(self) -> str:
        """For the names of variants."""
        return f"heads{self.heads}/block{self.block}/warps{self.warps}/stages{self.stages}"

    def full_label(self) -> str:
        """The same where choices differ in registers alone."""
        return self.label() + ("" if self.max_registers is None else f"/registers{self.max_registers}")


_SMALL = Choice(16, 32, 8, 2, 1)
_SMALL_255 = Choice(16, 32, 8, 2, 1, 255)  # left alone, the assembler aims lower, and spills; for v32 it is the reverse

# By layout, by rising number of heads. From 64 heads on Hopper multiplies by wgmma, below by mma.sync as all others do.
_HOPPER = {
    v4.NAME: (Choice(16, 32, 8, 2, 2, 128), Choice(32, 32, 8, 2, 1), Choice(64, 64, 8, 3, 1)),
    v32.NAME: (Choice(16, 32, 4, 3, 2), Choice(64, 32, 8, 3, 1)),
    mla_bf16.NAME: (Choice(16, 32, 8, 2, 2, 128), Choice(32, 32, 8, 2, 1), Choice(64, 32, 8, 2, 1)),
}
# Later compilers keep queries in registers from tile to tile, which 3.6 leaves in shared memory: less fits beside them.
_HOPPER_LATER = {
    v4.NAME: (_SMALL_255, Choice(32, 32, 8, 2, 1), Choice(64, 32, 8, 2, 1)),
    v32.NAME: (_SMALL,),
    mla_bf16.NAME: (_SMALL_255, Choice(32, 32, 8, 2, 1), Choice(64, 32, 8, 2, 1)),
}
# Cards that nobody measured: what compiles without spills on all of them and fits 99 KiB.
_DEFAULT = {v4.NAME: (_SMALL_255,), v32.NAME: (_SMALL,), mla_bf16.NAME: (_SMALL_255,)}
# What `thalweg kernels tune` tries on a card; it finds out by itself what fits, and how many programs are resident.
CANDIDATES = (
    *(Choice(16, 32, warps, stages, 1) for warps in (4, 8) for stages in (2, 3)),
    Choice(16, 32, 8, 2, 1, 255),
    Choice(16, 32, 8, 2, 1, 128),
    Choice(16, 64, 8, 2, 1),
    Choice(16, 16, 4, 2, 1),
    Choice(32, 32, 8, 2, 1),
    Choice(32, 32, 8, 3, 1),
    Choice(32, 64, 8, 2, 1),
    Choice(64, 32, 8, 2, 1),
    Choice(64, 32, 8, 3, 1),
    Choice(64, 64, 8, 2, 1),
    Choice(64, 64, 8, 3, 1),
)


def choose(hardware: Hardware, layout: str, heads: int) -> Choice:
    """The configuration for so many heads: the smallest tile that holds them, or the largest there is."""
    choices = all_choices(hardware, layout)
    return next((choice for choice in choices if heads <= choice.heads), choices[-1])


def choose_at_once(
    hardware: Hardware, layout: str, heads: int, rows: int, widths: tuple[int, ...], multiprocessors: int
) -> Choice:
    """As `choose`, but the smallest tile where the card holds a program for each of its tiles: none then waits for another.

    1 x 640 entries, 64 heads, v4, on an H200: 11.4 us by tiles of 16 heads, 13.5 by 32, 15.6 by 64.
    """
    small = all_choices(hardware, layout)[0]
    return small if all_at_once(small, heads, rows, widths, multiprocessors) else choose(hardware, layout, heads)


def all_at_once(choice: Choice, heads: int, rows: int, widths: tuple[int, ...], multiprocessors: int) -> bool:
    """Whether the card holds a program for each tile of `choice` at once."""
    tiles = sum(-(-width // choice.block) for width in widths)
    return tiles <= MOST_SPLITS and rows * -(-heads // choice.heads) * tiles <= choice.resident * multiprocessors


def all_choices(hardware: Hardware, layout: str) -> tuple[Choice, ...]:
    """Everything that `choose` can answer on this hardware, by rising number of heads.

    A measured table (`thalweg.ops.tables`) goes first, layout by layout; then what stands here for sm_90; then the default.
    """
    measured = _measured(hardware.name, layout, triton_version(), tables.folder())
    return untuned(hardware, layout) if measured is None else measured


def untuned(hardware: Hardware, layout: str) -> tuple[Choice, ...]:
    """What stands in this file for the hardware; for cards that are unknown the default."""
    if hardware.name != "sm_90":
        return _DEFAULT[layout]
    return (_HOPPER if triton_version().startswith("3.6.") else _HOPPER_LATER)[layout]


def as_table(choices: tuple[Choice, ...]) -> list[dict[str, Any]]:
    """Choices as a table's file has them."""
    return [asdict(choice) for choice in choices]


@functools.cache
def _measured(architecture: str, layout: str, triton: str, folder: str) -> tuple[Choice, ...] | None:
    """What a measured table has for a layout, or None. Raises UserError for what no kernel can be made of."""
    table = tables.load(ROOM, architecture, triton, folder)
    if table is None or layout not in table:
        return None
    where = f"the table {tables.file_name(ROOM, architecture)}, {layout}"
    names = [field.name for field in fields(Choice)]
    choices = []
    for row in table[layout]:
        if sorted(row) != sorted(names):
            raise UserError(f"{where}: got {', '.join(row)}, needs {', '.join(names)}")
        numbers = [value for name, value in row.items() if not (name == "max_registers" and value is None)]
        if not all(type(value) is int and value > 0 for value in numbers):
            raise UserError(f"{where}: got {row}, needs whole numbers above 0 (max_registers may be null)")
        choices.append(Choice(**row))
    sizes = [size for one in choices for size in (one.heads, one.block)]
    if any(size < 16 or size & (size - 1) for size in sizes) or any(one.warps & (one.warps - 1) for one in choices):
        raise UserError(f"{where}: needs powers of two for heads and block, from 16 on, and for warps")
    heads = [one.heads for one in choices]
    if not heads or heads != sorted(set(heads)):
        raise UserError(f"{where}: got tiles of {heads} heads, needs one at least, by rising number of heads")
    return tuple(choices)


# A launch's time in units of 32 cached rows: what a program pays before its first tile and for its result, what the merge
# costs, and what each partial result of 64 heads adds to it. Not measured.
_PROGRAM, _MERGE, _PARTIAL = 2.0, 2.0, 0.05
_DETERMINISTIC_ROWS = 128  # cached rows of a split


def splits_of(choice: Choice, programs: int, tiles: int, multiprocessors: int, deterministic: bool) -> int:
    """Into how many parts the lists are divided: `programs` programs a split, lists of up to `tiles` tiles.

    Deterministic: by the lists' width alone, so that a row's sums have one order whatever the batch.
    """
    most = max(1, min(MOST_SPLITS, tiles))
    if deterministic:
        return max(1, min(most, -(-tiles * choice.block // _DETERMINISTIC_ROWS)))
    resident = choice.resident * multiprocessors
    unit = choice.block / 32

    def cost(splits: int) -> float:
        waves = -(-programs * splits // resident)
        merge = _MERGE + _PARTIAL * programs * splits * choice.heads / 64 if splits > 1 else 0.0
        return waves * (_PROGRAM + unit * -(-tiles // splits)) + merge

    return min(range(1, most + 1), key=cost)
