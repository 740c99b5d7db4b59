"""The curve in the model card is what the committed table of the run gives."""

import json
import re
from pathlib import Path

import pytest

from thalweg.models.open import TINY
from tools.loss_curve import draw, read, write_table

XZ = 2.1561  # bits per byte of xz -9 on the held-out text, as the card says


def test_the_committed_picture_can_be_drawn_again() -> None:
    assert draw(read(TINY / "training_log.csv"), XZ) == (TINY / "loss_curve.svg").read_text()


def test_a_log_becomes_one_line_a_step(tmp_path: Path) -> None:
    entries = [
        {
            "step": 1,
            "length": 1024,
            "lm_bits": 8.37281,
            "mtp_bits": 8.2,
            "index_kl": 0.5,
            "grad_norm": 2.1,
            "seconds": 7.4,
        },
        {
            "step": 400,
            "length": 1024,
            "lm_bits": 1.5,
            "mtp_bits": 1.6,
            "index_kl": 0.2,
            "grad_norm": 0.2,
            "seconds": 53.4,
        },
        {"step": 400, "heldout_bits_per_byte": 1.52626, "heldout_mtp": 1.66},
    ]
    log, table = tmp_path / "log.jsonl", tmp_path / "training_log.csv"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    write_table(read(log), table)
    first, second = read(table)
    assert first == {"step": 1, "length": 1024, "lm_bits": 8.3728, "mtp_bits": 8.2, "index_kl": 0.5, "seconds": 7.4}
    assert (second["lm_bits"], second["heldout_bits_per_byte"]) == (1.5, 1.5263)


def test_a_higher_loss_is_drawn_higher() -> None:
    rows = [{"step": step, "lm_bits": bits} for step, bits in ((0.0, 2.0), (50.0, 1.5), (100.0, 1.0))]
    (points,) = re.findall(r'points="([^"]+)" fill="none" stroke="#2a6fbb"', draw(rows, None))
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    heights = [y for _, y in places]
    assert heights[0] < heights[1] < heights[2], "pixels count downwards"
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
