"""`thalweg kernels bench`: the GPU operations on this card against every peer that can be imported here."""

import argparse
import subprocess
import sys
from pathlib import Path

from thalweg import __version__
from thalweg.kernels.bench import adapters, records, run, session, summary
from thalweg.kernels.bench.cases import Case

# Most telling first: the time may not suffice for all.
CASES = (
    Case(64, 32768, 131072),
    Case(1, 32768, 131072),
    Case(16, 2048, 131072),
    Case(64, 128, 1048576),
    Case(1, 128, 8192),
    Case(64, 32768, 131072, rows=2),
    Case(16, 262144, 1048576),
)


def main(options: argparse.Namespace) -> int:
    """Runs the verb: `options.minutes`, `options.json` (a path or None). Raises UserError where there is no GPU."""
    run.require_gpu()
    impls = list(adapters.IMPLEMENTATIONS)
    stamp = records.gpu_stamp(_commit(), "thalweg " + " ".join(sys.argv[1:]))
    print(records.machine(stamp))
    workers = session.workers(impls, None)
    outcome = run.run(list(CASES), workers, stamp, options.minutes, print, options.json)
    for line in summary.lines(outcome.records):
        print(line)
    for line in advice(outcome):
        print(line)
    return 0 if outcome.records else 1


def advice(outcome: run.Outcome) -> list[str]:
    """What to enable and why: by these times, on this card."""
    lines = [
        f"{adapter.impl} was not measured: it cannot be imported here; install {adapter.install}"
        for adapter in adapters.ADAPTERS
        if adapter.impl in outcome.absent and adapter.install
    ]
    for op in ("mqa_logits", "topk", "index_topk"):
        lines += _advice_on(op, outcome.records)
    return lines


def _advice_on(op: str, measured: list[records.Record]) -> list[str]:
    times: dict[str, dict[str, float]] = {}
    for record in measured:
        if record["op"] == op:
            times.setdefault(summary.label(Case(**record["case"])), {})[record["impl"]] = record["us"]
    ours = [case for case in times.values() if "thalweg" in case]
    if not ours:
        return [f"{op}: thalweg gave no right result here; keep what you have"]
    compared = [case for case in ours if len(case) > 1]
    if not compared:
        return [f"{op}: no peer to compare with; enable thalweg's where you have none"]
    ratios = [min(us for impl, us in case.items() if impl != "thalweg") / case["thalweg"] for case in compared]
    mean, won = summary.geomean(ratios), sum(ratio >= 1 for ratio in ratios)
    choice = "enable thalweg's" if mean >= 1 else "keep the peer's"
    return [f"{op}: {choice}: {mean:.2f} x the fastest peer (geomean), faster at {won} of {len(ratios)} points"]


def _commit() -> str:
    """The commit of a checkout, else the version."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True) if _in_checkout() else None
    return answer.stdout.strip() if answer is not None and answer.returncode == 0 else f"v{__version__}"


def _in_checkout() -> bool:
    return (Path(__file__).resolve().parents[4] / ".git").exists()
