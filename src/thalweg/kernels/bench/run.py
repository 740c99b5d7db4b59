"""Cases by implementations, in time: what the scripts of `benchmarks/` and `thalweg kernels bench` share."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thalweg.errors import UserError
from thalweg.kernels.bench import records, session
from thalweg.kernels.bench.benchmark import Benchmark
from thalweg.kernels.bench.cases import FLOP_PER_SECOND, Case, label
from thalweg.kernels.bench.records import Record

Say = Callable[[str], object]


@dataclass
class Outcome:
    """What a run gave. `absent` names implementations none of whose operations could start."""

    records: list[Record] = field(default_factory=list)
    left_out: list[Case] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def require_gpu() -> None:
    """Raises UserError where there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"it times GPU kernels, and torch {torch.__version__} finds no CUDA device here; run it where there is one"
        )


def run(
    benchmark: Benchmark,
    cases: Sequence[Case],
    workers: list[session.Worker],
    stamp: Record,
    minutes: float | None,
    say: Say,
    into: Path | None = None,
) -> Outcome:
    """Measures every case by every worker until `minutes` are over; records go into the file `into` after every case."""
    began, longest = time.monotonic(), 0.0
    outcome, identity = Outcome(), {"run": secrets.token_hex(4), **stamp}
    if into is not None:
        records.merge(into, [])  # a place that cannot be written to is better known before the work
    try:
        _start(workers, outcome, say)
        rate = next((worker.hello["flop_per_second"] for worker in workers if "flop_per_second" in worker.hello), None)
        say(f"floors: 4.3 TB/s, {(rate or FLOP_PER_SECOND) / 1e12:.0f} TFLOP/s " + _origin(benchmark, rate))
        for number, case in enumerate(cases):
            begin = time.monotonic()
            if minutes is not None and number and begin - began + longest > minutes * 60:
                outcome.left_out = list(cases[number:])
                break
            made = _one_case(benchmark, case, workers, identity, rate, say)
            outcome.records += made
            if into is not None and made:
                records.merge(into, made)
            longest = max(longest, time.monotonic() - begin)
    finally:
        for worker in workers:
            worker.stop()
    for case in outcome.left_out:
        say(f"left out, out of time: {label(case)}")
    return outcome


def _start(workers: list[session.Worker], outcome: Outcome, say: Say) -> None:
    for worker in workers:
        worker.start()
    for worker in workers:
        for failure in worker.wait_until_ready():
            say(f"FAILED {failure}")
        if not worker.alive:
            outcome.absent.append(worker.impl)


def _one_case(
    benchmark: Benchmark, case: Case, workers: list[session.Worker], stamp: Record, rate: float | None, say: Say
) -> list[Record]:
    results, seed = [], secrets.randbelow(2**31)
    for worker in workers:
        fresh, failures = worker.run(case, seed)
        results += fresh
        for failure in failures:
            say(f"FAILED {label(case)}: {failure}")
    made = benchmark.records_of(case, results, stamp, rate)
    say(label(case))
    for record in made:
        variant = record.get("variant") or " + ".join(f"{op} {us:.2f}" for op, us in record["parts"].items())
        say(
            f"  {record['op']:<10} {record['impl']:<22} {record['us']:>10.2f} us  floor {record['floor_us']:>8.2f}"
            f"  error {record['error']:.1e}  {variant}"
        )
    return made


def _origin(benchmark: Benchmark, rate: float | None) -> str:
    if rate is None or benchmark.rate is None:
        return "(bf16, as documented)"
    return f"({benchmark.rate.name} by torch on this card, now)"
