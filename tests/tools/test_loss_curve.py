"""The curves in the model card are what the committed tables of the two runs give."""

import json
import re
from pathlib import Path

import pytest

from thalweg.models.open import TINY
from tools.loss_curve import draw, read, write_table

XZ = 2.1561  # bits per byte of xz -9 on the held-out text, as the card says


@pytest.mark.parametrize(
    ("table", "picture", "xz"),
    [("training_log.csv", "loss_curve.svg", XZ), ("retrieval_log.csv", "retrieval_curve.svg", None)],
)
def test_the_committed_pictures_can_be_drawn_again(table: str, picture: str, xz: float | None) -> None:
    assert draw(read(TINY / table), xz) == (TINY / picture).read_text()


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
    assert "answer_bits" not in table.read_text(), "columns that the run lacks"


def test_a_higher_loss_is_drawn_higher() -> None:
    rows = [{"step": step, "lm_bits": bits} for step, bits in ((0.0, 2.0), (50.0, 1.5), (100.0, 1.0))]
    (points,) = re.findall(r'points="([^"]+)" fill="none" stroke="#2a6fbb"', draw(rows, None))
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    heights = [y for _, y in places]
    assert heights[0] < heights[1] < heights[2], "pixels count downwards"
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)


def test_a_retrieval_log_keeps_what_was_found_and_its_answers_are_drawn_by_decades(tmp_path: Path) -> None:
    table = tmp_path / "retrieval_log.csv"
    entries = [{"step": step, "answer_bits": bits} for step, bits in ((0.0, 1.0), (50.0, 0.01), (100.0, 0.0001))]
    write_table([*entries, {"step": 100, "found_at_1024": 0.984375}], table)
    rows = read(table)
    assert rows[2] == {"step": 100, "answer_bits": 0.0001, "found_at_1024": 0.9844}
    (points,) = re.findall(r'points="([^"]+)" fill="none" stroke="#8a4fa3"', draw(rows, None))
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights[0] < heights[1] < heights[2]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
