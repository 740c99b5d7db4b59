"""What the index benchmark measures: cases, the default grid, and the least time that bytes and FLOP allow."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

from thalweg.errors import UserError
from thalweg.kernels.bench import cases
from thalweg.layouts import sizes

HEADS = 64
RATIO = 4  # tokens a key stands for (CSA)
PAGE_KEYS = sizes.INDEX_PAGE_KEYS

BATCHES = (1, 4, 16, 64, 128)
KEYS = (128, 2048, 32768, 262144)
CEILINGS = (8192, 131072, 1048576)
ROWS = (1, 2, 4)


@dataclass(frozen=True, order=True)
class Case:
    """One point: `batch` requests with `keys` live keys each under a ceiling of `ceiling` tokens, `rows` query rows a request."""

    bench: ClassVar[str] = "index"
    batch: int
    keys: int
    ceiling: int
    rows: int = 1
    k: int = 512

    def __post_init__(self) -> None:
        cases.require_positive(self)
        if self.ceiling % (RATIO * PAGE_KEYS):
            raise UserError(f"case: ceiling={self.ceiling}, needs a multiple of {RATIO * PAGE_KEYS} tokens")
        if self.keys * RATIO > self.ceiling:
            raise UserError(
                f"case: keys={self.keys} are {self.keys * RATIO} tokens, more than the ceiling {self.ceiling}"
            )

    @property
    def total_rows(self) -> int:
        return self.batch * self.rows

    @property
    def live_pages(self) -> int:
        """Pages that hold the keys of one request."""
        return -(-self.keys // PAGE_KEYS)

    @property
    def table_width(self) -> int:
        """Pages of a request's table: the ceiling's."""
        return self.ceiling // RATIO // PAGE_KEYS

    def bytes_moved(self, op: str) -> int:
        """The least that `op` reads and writes: each key once for all rows of its request."""
        rows, selected = self.total_rows, self.total_rows * self.k * 4
        scores = rows * self.keys * 4
        scored = self.batch * self.keys * sizes.INDEX_FP8_KEY_BYTES + rows * HEADS * (sizes.INDEX_DIM + 4)
        return {"mqa_logits": scored + scores, "topk": scores + selected, "index_topk": scored + 2 * selected}[op]

    def flop(self, op: str) -> int:
        """A multiply-add is 2; selection counts none."""
        return 0 if op == "topk" else 2 * HEADS * sizes.INDEX_DIM * self.total_rows * self.keys

    def floor_us(self, op: str, flop_per_second: float = cases.FLOP_PER_SECOND) -> float:
        """In microseconds; a card that multiplies e4m3 is held to the rate measured in the run."""
        return cases.floor_us(self.bytes_moved(op), self.flop(op), flop_per_second)


def parse(text: str) -> Case:
    """`batch=64,keys=32768,ceiling=131072,rows=1` as a case; rows and k have defaults."""
    return cases.parse(text, Case)


def grid() -> list[Case]:
    """Every point of the default grid whose keys fit under its ceiling, small work first."""
    points = itertools.product(ROWS, BATCHES, KEYS, CEILINGS)
    return [Case(b, keys, ceiling, rows) for rows, b, keys, ceiling in points if keys * RATIO <= ceiling]


# Most telling first: the time may not suffice for all.
TELLING = (
    Case(64, 32768, 131072),
    Case(1, 32768, 131072),
    Case(16, 2048, 131072),
    Case(64, 128, 1048576),
    Case(1, 128, 8192),
    Case(64, 32768, 131072, rows=2),
    Case(16, 262144, 1048576),
)
