"""Draws the records of the index benchmark: cost against the ceiling, and against the number of live keys.

    python benchmarks/index_plots.py benchmarks/results/h200/index.jsonl --out benchmarks/results/h200

Writes index_by_ceiling.svg and index_by_keys.svg for one row a request. Thalweg is drawn solid, the fastest peer pair of the
same run dashed; a ceiling that costs nothing is a level line.
"""

import argparse
import math
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

from thalweg.errors import UserError
from thalweg.kernels.bench import records
from thalweg.kernels.bench.index import summary
from thalweg.kernels.bench.index.summary import Point

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 570, 40, 370
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d5fb0", "#b5651d")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="a file that benchmarks/index.py --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the pictures")
    options = parser.parse_args()
    try:
        counted, _ = summary.points(records.read(options.records))
    except UserError as error:
        print(f"index_plots.py: {error}", file=sys.stderr)
        return 2
    single = [point for point in counted if point.case.rows == 1]
    if not single:
        print(f"index_plots.py: {options.records}: no point of one row a request that counts", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "index_by_ceiling.svg").write_text(by_ceiling(single))
    (options.out / "index_by_keys.svg").write_text(by_keys(single))
    return 0


def by_ceiling(points: list[Point]) -> str:
    """A line for every number of keys, at the largest batch measured."""
    batch = max(point.case.batch for point in points)
    chosen = [point for point in points if point.case.batch == batch]
    title = f"index_topk, batch {batch}, one row a request: us against the ceiling in tokens"
    return _chart(title, chosen, lambda p: p.case.ceiling, lambda p: f"{p.case.keys:,} keys")


def by_keys(points: list[Point]) -> str:
    """A line for every batch, at the largest ceiling measured."""
    ceiling = max(point.case.ceiling for point in points)
    chosen = [point for point in points if point.case.ceiling == ceiling]
    title = f"index_topk, ceiling {ceiling:,} tokens, one row a request: us against live keys"
    return _chart(title, chosen, lambda p: p.case.keys, lambda p: f"batch {p.case.batch}")


def _chart(title: str, points: list[Point], across: Callable[[Point], int], name: Callable[[Point], str]) -> str:
    """Both axes logarithmic; `across` gives the place of a point on the lower one, `name` the line it is on."""
    columns = sorted({across(point) for point in points})
    times = [time for point in points for time in (point.us, point.peer_us)]
    low, high = _decade(min(times), up=False), _decade(max(times), up=True)
    lines: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda p: (p.case.keys, p.case.batch, across(p))):
        lines.setdefault(name(point), []).append(point)

    def x(value: int) -> float:  # columns stand evenly: a factor of 4 to 16 apart
        return LEFT + (RIGHT - LEFT) * (columns.index(value) + 0.5) / len(columns)

    def y(value: float) -> float:
        exponent, first, last = math.log10(value), math.log10(low), math.log10(high)
        return BOTTOM - (BOTTOM - TOP) * (exponent - first) / (last - first)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">']
    out += [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', _text(LEFT, 20, title, size=13)]
    tick = low
    while tick <= high * 1.001:
        out.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        out.append(_text(LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
        tick *= 10
    out += [_text(x(column), BOTTOM + 20, f"{column:,}", anchor="middle") for column in columns]
    for number, (label, members) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        ours = [(x(across(point)), y(point.us)) for point in members]
        peers = [(x(across(point)), y(point.peer_us)) for point in members]
        out += [_line(ours, colour, ""), _line(peers, colour, ' stroke-dasharray="5 4"')]
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in (*ours, *peers)]
        height = TOP + 20 * number
        out.append(f'<line x1="{RIGHT + 15}" x2="{RIGHT + 40}" y1="{height}" y2="{height}" stroke="{colour}"/>')
        out.append(_text(RIGHT + 46, height + 4, label))
    out.append(_text(RIGHT + 15, TOP + 20 * len(lines) + 10, "solid thalweg, dashed peers"))
    return "\n".join([*out, "</svg>", ""])


def _decade(value: float, up: bool) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return power * 10 if up else power


def _line(points: list[tuple[float, float]], colour: str, dashes: str) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())
