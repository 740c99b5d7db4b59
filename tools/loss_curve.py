"""Makes the training log a table and draws it.

    python -m tools.loss_curve .local/out/log.jsonl --out FOLDER       # writes FOLDER/training_log.csv, then draws it
    python -m tools.loss_curve FOLDER/training_log.csv --out FOLDER    # draws it again

Writes FOLDER/loss_curve.svg. A resumed run appends to its log.jsonl: hand over the whole file.
"""

import argparse
import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

from tools.tiny.schedule import DENSE, LENGTHS

COLUMNS = {  # of the table: digits after the point
    "step": 0,
    "length": 0,
    "lm_bits": 4,
    "mtp_bits": 4,
    "index_kl": 4,
    "heaviest_expert": 3,
    "rate": 4,
    "tokens_per_s": 0,
    "seconds": 1,
    "heldout_bits_per_byte": 4,
    "heldout_mtp": 4,
}
WIDTH, LEFT, RIGHT = 860, 60, 850
Row = dict[str, float]


@dataclass(frozen=True)
class Panel:
    """A coordinate system between two heights of the picture (top < bottom, in pixels)."""

    top: int
    bottom: int
    low: float
    high: float
    last_step: float

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last_step

    def y(self, value: float) -> float:
        """Values above the panel are drawn on its upper edge."""
        return self.bottom - (self.bottom - self.top) * (min(value, self.high) - self.low) / (self.high - self.low)

    def line(self, rows: list[Row], column: str, colour: str, width: float) -> str:
        points = " ".join(f"{self.x(r['step']):.1f},{self.y(r[column]):.1f}" for r in rows if column in r)
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def dots(self, rows: list[Row], column: str, colour: str) -> str:
        points = [(self.x(r["step"]), self.y(r[column])) for r in rows if column in r]
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)

    def level(self, value: float, colour: str, dashes: str = "") -> str:
        y = f"{self.y(value):.1f}"
        return f'<path d="M{LEFT} {y}H{RIGHT}" stroke="{colour}" stroke-dasharray="{dashes}"/>'

    def grid(self, spacing: float) -> str:
        out = []
        for number in range(math.ceil(self.low / spacing - 1e-9), math.floor(self.high / spacing + 1e-9) + 1):
            value = number * spacing
            out.append(self.level(value, "#ddd"))
            out.append(label(LEFT - 8, self.y(value) + 4, f"{value:.2g}", "end"))
        return "".join(out)


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
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in merged.values():
            table.writerow(f"{row[name]:.{digits}f}" if name in row else "" for name, digits in COLUMNS.items())


def draw(rows: list[Row], xz: float | None) -> str:
    """The picture: losses in bits per byte above, the indexer's distillation loss in nats below."""
    last = max(row["step"] for row in rows)
    losses, indexer = Panel(40, 330, 0.8, 2.6, last), Panel(375, 475, 0.1, 0.6, last)
    parts = [losses.grid(0.2), indexer.grid(0.1)]
    for part, text in [(DENSE, "the indexer chooses"), *((part, f"{length:,} tokens") for part, length in LENGTHS[1:])]:
        x = losses.x(part * last)
        parts.append(f'<path d="M{x:.1f} 40V330M{x:.1f} 375V475" stroke="#999" stroke-dasharray="2 3"/>')
        parts.append(label(x + 4, 52, text, colour="#666"))
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
    parts.append(label(LEFT, 24, "bits per byte (the first steps, up to 8.4, are cut off)"))
    parts.append(label(LEFT, 366, "indexer: KL from the attention over all entries, nats, summed over CSA layers"))
    for number in range(0, int(last) + 1, 1000):
        parts.append(label(losses.x(number), 492, f"{number:,}", "middle"))
    parts.append(label((LEFT + RIGHT) / 2, 510, "step", "middle"))
    header = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 20} 520" font-family="sans-serif" font-size="13">'
    return "\n".join([header, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path, help="log.jsonl of a run, or a training_log.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder for training_log.csv and loss_curve.svg")
    parser.add_argument("--xz", type=float, help="bits per byte of xz -9 on the held-out text, for a line")
    options = parser.parse_args()
    table = options.out / "training_log.csv"
    if options.log.suffix != ".csv":
        write_table(read(options.log), table)
    (options.out / "loss_curve.svg").write_text(draw(read(table), options.xz))


if __name__ == "__main__":
    main()
