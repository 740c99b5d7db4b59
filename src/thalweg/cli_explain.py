"""`thalweg explain`: which implementation of every operation runs here, and why."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from thalweg.cli_streams import write


def add(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser = verbs.add_parser("explain", help="which implementation of every operation runs here, and why")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one, else cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints one line an operation."""
    import torch

    from thalweg import ops
    from thalweg.engine.device import choose_device

    device = choose_device(arguments.device)
    choices = ops.explain(device)
    if arguments.json:
        write(json.dumps([asdict(choice) for choice in choices], indent=1) + "\n")
        return 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = [f"operations on {device} ({name}), torch {torch.__version__}"]
    lines += [f"  {choice.operation:<22} {choice.implementation:<10} {choice.why}" for choice in choices]
    write("\n".join(lines) + "\n")
    return 0
