"""Benchmark records: one JSON object a line, the newest run of a case replacing the older.

python -m thalweg.kernels.bench.records FROM INTO      # merges one file of records into another
"""

import datetime
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thalweg.errors import UserError
from thalweg.kernels.bench.cases import FLOP_PER_SECOND, Case

Record = dict[str, Any]


def gpu_stamp(commit: str, command: str) -> Record:
    """What every record says of its run, on the current CUDA device."""
    import torch
    import triton

    return {
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def machine(stamp: Record) -> str:
    """The card, its clocks now and the versions, in one line."""
    try:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader", "--id=0"]
        clocks = "clocks " + subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        clocks = f"clocks unknown ({type(error).__name__} from nvidia-smi)"
    versions = ", ".join(f"{name} {stamp[name]}" for name in ("torch", "triton", "commit"))
    return f"{stamp['gpu']}, {clocks}, {versions}"


def records_of(case: Case, results: list[dict[str, Any]], stamp: Record, flop_per_second: float | None) -> list[Record]:
    """The record of each result of one case; products at `flop_per_second`, or as documented for None."""
    rate = flop_per_second or FLOP_PER_SECOND
    extras = ("variant", "variants", "checked_rows", "scratch_bytes", "sets")
    return [
        record(case, one["op"], one["impl"], one["us"], one["error"], rate, {name: one[name] for name in extras}, stamp)
        for one in results
    ]


def record(
    case: Case, op: str, impl: str, us: float, error: float, rate: float, extra: Record, stamp: Record
) -> Record:
    """One record: what was measured, its floor, then `extra`, then `stamp`."""
    head = {"bench": case.bench, "op": op, "impl": impl, "case": asdict(case), "us": round(us, 3)}
    floor = {"floor_us": round(case.floor_us(op, rate), 3), "floor_tflops": round(rate / 1e12, 1)}
    return {**head, **floor, "error": float(f"{error:.3g}"), "ok": True, **extra, **stamp}


def read(path: Path) -> list[Record]:
    """The records of a file, none where there is no file. Raises UserError for a line that is no record."""
    if not path.exists():
        return []
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        made = [json.loads(line) for line in lines]
        for record in made:
            _key(record)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a file of benchmark records ({type(error).__name__}: {error})") from error
    return made


def merge(path: Path, newer: list[Record]) -> None:
    """Writes `newer` into the file, each in the place of the record that it replaces, else at the end.

    Raises UserError where the file cannot be written, or holds something else.
    """
    merged = {_key(record): record for record in read(path)}
    merged.update({_key(record): record for record in newer})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in merged.values()))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _key(record: Record) -> tuple[Any, ...]:
    case = json.dumps(record["case"], sort_keys=True)
    return record["bench"], record["op"], record["impl"], record.get("gpu", record.get("cpu", "")), case


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m thalweg.kernels.bench.records FROM INTO", file=sys.stderr)
        return 2
    try:
        merge(Path(sys.argv[2]), read(Path(sys.argv[1])))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
