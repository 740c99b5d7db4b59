"""`thalweg kernels bench`: the GPU operations on this card against every peer that can be imported here."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from thalweg import __version__
from thalweg.kernels.bench import attention, index, records, run, session
from thalweg.kernels.bench.benchmark import Benchmark
from thalweg.kernels.bench.summary import geomean

BENCHMARKS = (index.BENCHMARK, attention.BENCHMARK)


def main(options: argparse.Namespace) -> int:
    """Runs the verb: `options.minutes`, `options.json` (a path or None). Raises UserError where there is no GPU."""
    run.require_gpu()
    stamp = records.gpu_stamp(commit_here(), "thalweg " + " ".join(sys.argv[1:]))
    print(records.machine(stamp))
    end = time.monotonic() + options.minutes * 60
    lines, right = [], False
    for number, benchmark in enumerate(BENCHMARKS):
        share = max(0.0, end - time.monotonic()) / 60 / (len(BENCHMARKS) - number)
        workers = session.workers(benchmark.name, list(benchmark.implementations), None)
        outcome = run.run(benchmark, benchmark.telling, workers, stamp, share, print, options.json)
        lines += [*benchmark.summary(outcome.records), *advice(benchmark, outcome)]
        right = right or bool(outcome.records)
    for line in lines:
        print(line)
    return 0 if right else 1


def advice(benchmark: Benchmark, outcome: run.Outcome) -> list[str]:
    """What to enable and why: by these times, on this card."""
    lines = [
        f"{adapter.impl} was not measured: it cannot be imported here; install {adapter.install}"
        for adapter in benchmark.adapters
        if adapter.impl in outcome.absent and adapter.install
    ]
    for op in benchmark.ops:
        lines += _advice_on(op, outcome.records)
    return lines


def _advice_on(op: str, measured: list[records.Record]) -> list[str]:
    times: dict[str, dict[str, float]] = {}
    for record in measured:
        if record["op"] == op:
            times.setdefault(str(record["case"]), {})[record["impl"]] = record["us"]
    ours = [case for case in times.values() if "thalweg" in case]
    if not ours:
        return [f"{op}: thalweg gave no right result here; keep what you have"]
    compared = [case for case in ours if len(case) > 1]
    if not compared:
        return [f"{op}: no peer to compare with; enable thalweg's where you have none"]
    ratios = [min(us for impl, us in case.items() if impl != "thalweg") / case["thalweg"] for case in compared]
    mean, won = geomean(ratios), sum(ratio >= 1 for ratio in ratios)
    choice = "enable thalweg's" if mean >= 1 else "keep the peer's"
    return [f"{op}: {choice}: {mean:.2f} x the fastest peer (geomean), faster at {won} of {len(ratios)} points"]


def commit_here() -> str:
    """The commit of a checkout, else the version."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True) if _in_checkout() else None
    return answer.stdout.strip() if answer is not None and answer.returncode == 0 else f"v{__version__}"


def _in_checkout() -> bool:
    return (Path(__file__).resolve().parents[4] / ".git").exists()
