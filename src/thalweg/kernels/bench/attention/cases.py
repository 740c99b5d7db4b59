"""What the attention benchmark measures: decode rows and chunks of prefill, their default grid, and their floors."""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from thalweg.errors import UserError
from thalweg.kernels.bench import cases
from thalweg.layouts import sizes

WINDOW = 128  # of the entries of a v4 row, those in the window's cache; the rest lie in a compressed cache
CSA_ENTRIES = 512  # extra entries up to this many are selected ones (CSA), more are a whole context at ratio 128 (HCA)
PREFILL_CONTEXT = 131072  # tokens whose c4 entries the rows of a chunk select from
SLOT_BYTES = {"v4": sizes.V4_SLOT_BYTES, "v32": sizes.V32_SLOT_BYTES}
WIDTH = {"v4": sizes.LATENT_DIM, "v32": sizes.MLA_DIM}

HEADS = (64, 16, 8, 128, 32)
BATCHES = (1, 4, 16, 64, 128, 256)
ENTRIES = {"v4": (640, 1152, 8320, 128), "v32": (2048,)}
PREFILL_ROWS = (1024, 4096)


@dataclass(frozen=True, order=True)
class Decode:
    """One point: `batch` rows of `heads` heads, each attending to `entries` entries that no other row attends to."""

    bench: ClassVar[str] = "attention"
    batch: int
    heads: int
    entries: int
    layout: str = "v4"

    def __post_init__(self) -> None:
        cases.require_positive(self)
        if self.layout not in SLOT_BYTES:
            raise UserError(f"case: layout={self.layout}; there are: {', '.join(SLOT_BYTES)}")
        _check(self.heads, self.entries, window=0 if self.layout == "v32" else WINDOW)

    @property
    def rows(self) -> int:
        return self.batch

    @property
    def window_entries(self) -> int:
        """Entries of a row in the first cache."""
        return self.entries if self.layout == "v32" else WINDOW

    @property
    def distinct_entries(self) -> int:
        """Entries that all rows together read."""
        return self.batch * self.entries

    def floor_us(self, op: str, flop_per_second: float = cases.FLOP_PER_SECOND) -> float:
        """In microseconds."""
        return _floor_us(self, flop_per_second)


@dataclass(frozen=True, order=True)
class Prefill:
    """One point: a chunk of `rows` rows of one request, v4: 128 entries of each row are the window before it.

    Up to 512 others are picked by each row from the c4 entries of 131,072 tokens; more are the same for all rows.
    """

    bench: ClassVar[str] = "prefill"
    layout: ClassVar[str] = "v4"
    window_entries: ClassVar[int] = WINDOW
    rows: int
    heads: int
    entries: int

    def __post_init__(self) -> None:
        cases.require_positive(self)
        _check(self.heads, self.entries, WINDOW)

    @property
    def candidates(self) -> int:
        """Slots of the compressed cache that the rows may read."""
        extra = self.entries - WINDOW
        return PREFILL_CONTEXT // sizes.C4_RATIO if 0 < extra <= CSA_ENTRIES else extra

    @property
    def distinct_entries(self) -> int:
        """Entries that all rows together read, at most."""
        return self.rows + WINDOW - 1 + min(self.candidates, self.rows * (self.entries - WINDOW))

    def floor_us(self, op: str, flop_per_second: float = cases.FLOP_PER_SECOND) -> float:
        """In microseconds."""
        return _floor_us(self, flop_per_second)


Case = Decode | Prefill


def bytes_moved(case: Case) -> int:
    """The least that a call reads and writes: each entry once, q, the indices, and the result."""
    row = case.heads * (WIDTH[case.layout] + sizes.LATENT_DIM) * 2 + 4 * case.entries
    return case.distinct_entries * SLOT_BYTES[case.layout] + case.rows * row


def flop(case: Case) -> int:
    """Scores and values; a multiply-add is 2."""
    return 2 * case.rows * case.heads * case.entries * (WIDTH[case.layout] + sizes.LATENT_DIM)


def parse(text: str) -> Case:
    """`batch=64,heads=64,entries=640,layout=v4` (layout v4 by default) or `rows=4096,heads=64,entries=640` as a case."""
    return cases.parse(text, Prefill) if "rows" in cases.pairs(text) else cases.parse(text, Decode)


def case_of(fields: dict[str, Any]) -> Case:
    """The case of a record."""
    return Prefill(**fields) if "rows" in fields else Decode(**fields)


def grid() -> list[Case]:
    """Every point of the default grid, the telling ones first: then a run that stops in time has those."""
    decode = [
        Decode(batch, heads, entries, layout)
        for layout in ENTRIES
        for heads, entries, batch in itertools.product(HEADS, ENTRIES[layout], BATCHES)
    ]
    prefill = [Prefill(rows, heads, n) for heads in (64, 128) for n in (640, 1152) for rows in PREFILL_ROWS]
    return list(dict.fromkeys([*TELLING, *decode, *prefill]))


def _floor_us(case: Case, flop_per_second: float) -> float:
    return cases.floor_us(bytes_moved(case), flop(case), flop_per_second)


def _check(heads: int, entries: int, window: int) -> None:
    if heads > 128:
        raise UserError(f"case: heads={heads}, needs 1 to 128")
    # Peers gather 64 entries at a time and refuse other widths, in each of the caches.
    if entries % 64 or entries < window:
        raise UserError(f"case: entries={entries}, needs a multiple of 64, at least {max(window, 64)}")


TELLING: tuple[Case, ...] = (
    *(Decode(batch, 64, 640) for batch in (64, 1, 16, 128, 4, 256)),
    *(Decode(batch, heads, 640) for heads in (16, 8) for batch in (64, 1, 16)),
    *(Decode(batch, 64, entries) for entries in (8320, 1152) for batch in (64, 1, 16)),
    Prefill(4096, 64, 640),
    Decode(64, 64, 2048, "v32"),
    Decode(64, 128, 640),
    Decode(64, 32, 640),
    Decode(64, 64, 128),
    Prefill(4096, 64, 1152),
    Decode(1, 64, 128),
)
