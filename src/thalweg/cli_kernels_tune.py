"""`thalweg kernels tune`: its options; the work is in `thalweg.kernels.tune.verb`."""

import argparse
from pathlib import Path
from typing import Any


def add(actions: Any) -> None:
    """Adds the action to those of `thalweg kernels`."""
    parser = actions.add_parser("tune", help="time configurations of the attention kernel on this card, write a table")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path("tables"), help="where the table goes (default: tables)"
    )
    parser.add_argument("--layout", metavar="NAMES", default="v4,v32", help="layouts of caches (default: v4,v32)")
    parser.set_defaults(run=run, verb="kernels tune")


def run(arguments: argparse.Namespace) -> int:
    """Prints times and what is chosen; returns 0, or 1 where a layout has no right candidate."""
    from thalweg.kernels.tune import verb

    return verb.main(arguments)
