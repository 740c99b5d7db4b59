"""What every benchmark record says of its run: commit, machine, versions, date, command."""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def commit() -> str:
    """The short hash. Raises CalledProcessError outside a checkout: an unstamped record is worth nothing."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def stamp() -> dict[str, str | int]:
    """The fields, for a run on the CPU (of a run on a GPU: `thalweg.kernels.bench.records`). Raises as `commit` does."""
    return {
        "commit": commit(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
