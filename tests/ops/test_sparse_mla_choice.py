"""Few rows get small tiles, so that no tile waits for another; what a row gets with deterministic=True is not theirs to say."""

import pytest

from thalweg.ops import hardware
from thalweg.ops.sparse_mla import choice

CARD = hardware.by_architecture("sm_90")
SMALL = choice.all_choices(CARD, "v4")[0]


@pytest.mark.parametrize(
    ("rows", "widths", "small"), [(1, (128, 512), True), (2, (8320, 0), False), (64, (128, 512), False)]
)
def test_small_tiles_where_all_run_at_once(rows: int, widths: tuple[int, int], small: bool) -> None:
    chosen = choice.choose_at_once(CARD, "v4", 64, rows, widths, 132)
    assert chosen == (SMALL if small else choice.choose(CARD, "v4", 64))


@pytest.mark.parametrize("heads", [1, 16, 17, 64, 96, 128])
def test_the_smallest_tile_that_holds_the_heads_where_rows_are_many(heads: int) -> None:
    chosen = choice.choose_at_once(CARD, "v4", heads, 10_000, (128, 512), 132)
    tiles = [each.heads for each in choice.all_choices(CARD, "v4")]
    assert chosen.heads == min([tile for tile in tiles if tile >= heads], default=max(tiles))
