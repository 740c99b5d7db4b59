"""Makes the log of a training run a table and draws it.

    python -m tools.loss_curve OUT/log.jsonl --out FOLDER              # writes FOLDER/training_log.csv, then draws it
    python -m tools.loss_curve FOLDER/training_log.csv --out FOLDER    # draws it again

Writes FOLDER/loss_curve.svg. The log of tools.train_retrieval, known by its losses on answers, becomes retrieval_log.csv
and retrieval_curve.svg. A resumed run appends to its log.jsonl: hand over the whole file.
"""

import argparse
import csv
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.tiny import retrieval_schedule, schedule
from tools.tiny.retrieval_trainer import RetrievalSettings

COLUMNS = {  # of the table, where the run has them: digits after the point
    "step": 0,
    "length": 0,
    "lm_bits": 4,
    "mtp_bits": 4,
    "index_kl": 4,
    "answer_bits": 6,
    "answer_digits": 4,
    "heaviest_expert": 3,
    "rate": 4,
    "tokens_per_s": 0,
    "seconds": 1,
    "heldout_bits_per_byte": 4,
    "heldout_mtp": 4,
    **{f"found_at_{distance}": 4 for distance in RetrievalSettings.needle_distances},
}
WIDTH, LEFT, RIGHT = 860, 60, 850
Row = dict[str, float]
Border = tuple[float, str]  # a part of the run, and what begins there


@dataclass(frozen=True)
class Stage:
    """A kind of run: its files, and what its picture shows."""

    table: str
    picture: str
    title: str
    low: float  # bits per byte at the lower and the upper edge
    high: float
    steps: int  # between labels
    borders: tuple[tuple[Border, ...], ...]  # a line of labels each


def lengths(of_run: tuple[tuple[float, int], ...]) -> tuple[Border, ...]:
    return tuple((part, f"{length:,} tokens") for part, length in of_run[1:])


TEXT = Stage(
    "training_log.csv",
    "loss_curve.svg",
    "bits per byte (the first steps, up to 8.4, are cut off)",
    0.8,
    2.6,
    1000,
    (((schedule.DENSE, "the indexer chooses"), *lengths(schedule.LENGTHS)),),
)
RETRIEVAL = Stage(
    "retrieval_log.csv",
    "retrieval_curve.svg",
    "bits per byte, without the values of planted lines and of answers",
    0.7,
    1.8,
    400,
    (
        ((retrieval_schedule.DENSE, "the indexer chooses"), *lengths(retrieval_schedule.LENGTHS)),
        ((retrieval_schedule.CSA_ALONE, "questions see HCA entries"),),
    ),
)


def stage_of(rows: list[Row]) -> Stage:
    return RETRIEVAL if any("answer_bits" in row for row in rows) else TEXT


@dataclass(frozen=True)
class Panel:
    """A coordinate system between two heights of the picture (top < bottom, in pixels)."""

    top: int
    bottom: int
    low: float
    high: float
    last_step: float
    scale: Callable[[float], float] = float  # low, high and every value go through it

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last_step

    def y(self, value: float) -> float:
        """Values above the panel are drawn on its upper edge."""
        low, high, at = (self.scale(number) for number in (self.low, self.high, min(value, self.high)))
        return self.bottom - (self.bottom - self.top) * (at - low) / (high - low)

    def line(self, rows: list[Row], column: str, colour: str, width: float) -> str:
        points = " ".join(f"{self.x(r['step']):.1f},{self.y(r[column]):.1f}" for r in rows if column in r)
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def dots(self, rows: list[Row], column: str, colour: str) -> str:
        points = [(self.x(r["step"]), self.y(r[column])) for r in rows if column in r]
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)

    def level(self, value: float, colour: str, dashes: str = "") -> str:
        y = f"{self.y(value):.1f}"
        return f'<path d="M{LEFT} {y}H{RIGHT}" stroke="{colour}" stroke-dasharray="{dashes}"/>'

    def grid(self, values: Iterable[float]) -> str:
        return "".join(
            self.level(value, "#ddd") + label(LEFT - 8, self.y(value) + 4, f"{value:.2g}", "end") for value in values
        )

    def even_grid(self, spacing: float) -> str:
        first, last = math.ceil(self.low / spacing - 1e-9), math.floor(self.high / spacing + 1e-9)
        return self.grid(number * spacing for number in range(first, last + 1))


def label(x: float, y: float, text: str, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def read(path: Path) -> list[Row]:
    """Rows of a log.jsonl or of a table; what a row does not have is absent."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_table(rows: list[Row], path: Path) -> None:
    """One line a step, the held-out numbers of a step in its own line."""
    merged: dict[float, Row] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    columns = {name: digits for name, digits in COLUMNS.items() if any(name in row for row in rows)}
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        for row in merged.values():
            table.writerow(f"{row[name]:.{digits}f}" if name in row else "" for name, digits in columns.items())


def draw(rows: list[Row], xz: float | None) -> str:
    """The picture: bits per byte, the indexer's distillation loss in nats, and a retrieval run's bits per answered digit."""
    stage, last = stage_of(rows), max(row["step"] for row in rows)
    losses, indexer = Panel(40, 330, stage.low, stage.high, last), Panel(375, 475, 0.1, 0.6, last)
    answers = Panel(520, 620, 1e-5, 10.0, last, math.log10)
    panels = [losses, indexer] + [answers] * (stage is RETRIEVAL)
    bottom = panels[-1].bottom
    parts = [losses.even_grid(0.2), indexer.even_grid(0.1)]
    for place, borders in enumerate(stage.borders):
        for part, text in borders:
            x = losses.x(part * last)
            path = "".join(f"M{x:.1f} {panel.top}V{panel.bottom}" for panel in panels)
            parts.append(f'<path d="{path}" stroke="#999" stroke-dasharray="2 3"/>')
            parts.append(label(x + 4, 52 + 16 * place, text, colour="#666"))
    if xz is not None:
        parts.append(losses.level(xz, "#b00", "6 4"))
        parts.append(label(RIGHT - 4, losses.y(xz) - 5, f"xz -9 on the held-out text: {xz:.3f}", "end", "#b00"))
    parts.append(losses.line(rows, "mtp_bits", "#e9a23b", 1))
    parts.append(losses.line(rows, "lm_bits", "#2a6fbb", 1.2))
    parts.append(losses.dots(rows, "heldout_bits_per_byte", "#111"))
    parts.append(indexer.line(rows, "index_kl", "#5a8f3c", 1.2))
    for place, (colour, text) in enumerate(
        [
            ("#2a6fbb", "next byte, training batches"),
            ("#e9a23b", "the byte after it (MTP), training batches"),
            ("#111", "next byte, a fixed part of the held-out text"),
        ]
    ):
        parts.append(f'<path d="M430 {146 + 18 * place}h24" stroke="{colour}" stroke-width="4"/>')
        parts.append(label(462, 150 + 18 * place, text))
    parts.append(label(LEFT, 24, stage.title))
    parts.append(label(LEFT, 366, "indexer: KL from the attention over all entries, nats, summed over CSA layers"))
    if stage is RETRIEVAL:
        parts.append(answers.grid(10.0**power for power in range(-5, 2)))
        parts.append(answers.line(rows, "answer_bits", "#8a4fa3", 1.2))
        parts.append(label(LEFT, 511, "answers to questions: bits per digit, training batches (knowing nothing: 3.3)"))
    for number in range(0, int(last) + 1, stage.steps):
        parts.append(label(losses.x(number), bottom + 17, f"{number:,}", "middle"))
    parts.append(label((LEFT + RIGHT) / 2, bottom + 35, "step", "middle"))
    box = f"0 0 {WIDTH + 20} {bottom + 45}"
    header = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="13">'
    return "\n".join([header, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path, help="log.jsonl of a run, or its table")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the picture")
    parser.add_argument("--xz", type=float, help="bits per byte of xz -9 on the held-out text, for a line")
    options = parser.parse_args()
    rows = read(options.log)
    stage = stage_of(rows)
    if options.log.suffix != ".csv":
        write_table(rows, options.out / stage.table)
        rows = read(options.out / stage.table)
    (options.out / stage.picture).write_text(draw(rows, options.xz))


if __name__ == "__main__":
    main()
