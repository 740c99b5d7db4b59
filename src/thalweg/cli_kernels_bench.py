"""`thalweg kernels bench`: its options; the work is in `thalweg.kernels.bench.verb`."""

import argparse
from pathlib import Path
from typing import Any


def add(actions: Any) -> None:
    """Adds the action to those of `thalweg kernels`."""
    parser = actions.add_parser("bench", help="time the GPU operations on this card against the peers installed here")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="stop in time and say what was left out (default: 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the records into this file, too")
    parser.set_defaults(run=run, verb="kernels bench")


def run(arguments: argparse.Namespace) -> int:
    """Prints times, errors and advice; returns 0, or 1 where nothing gave a right result."""
    from thalweg.kernels.bench import verb

    return verb.main(arguments)
