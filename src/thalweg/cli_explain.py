"""`thalweg explain`: which implementation of every operation runs here, and why."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from thalweg.errors import UserError


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

    try:
        choices = ops.explain(arguments.device)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from None
    if arguments.json:
        print(json.dumps([asdict(choice) for choice in choices], indent=1))
        return 0
    device = choices[0].device
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    print(f"operations on {device} ({name}), torch {torch.__version__}")
    for choice in choices:
        print(f"  {choice.operation:<22} {choice.implementation:<10} {choice.why}")
    return 0
