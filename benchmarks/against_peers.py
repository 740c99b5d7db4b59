"""What the scripts that measure GPU operations against peers share: their options, and a run of one benchmark."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stamp import commit  # beside this file

from thalweg.errors import UserError
from thalweg.kernels.bench import records, run, session
from thalweg.kernels.bench.benchmark import Benchmark
from thalweg.kernels.bench.cases import Case


def main(
    benchmark: Benchmark,
    about: str,
    parse: Callable[[str], Case],
    grid: Callable[[], Sequence[Case]],
    say_more: Callable[[list[records.Record]], list[str]] = lambda measured: [],
) -> int:
    """The script of a benchmark: `parse` reads a --case, `grid` is the default, `say_more` goes before the summary."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--case", action="append", metavar="KEY=VALUE,...", help="a case instead of the default grid")
    names = ",".join(benchmark.implementations[:3])
    parser.add_argument("--impl", metavar="NAMES", help=f"for example {names} (default: all)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder that benchmarks/peers.py made")
    parser.add_argument("--minutes", type=float, help="stop in time and say what was left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the records into this file after every case")
    parser.add_argument("--commit", help="what to stamp where this is a copy without git")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="only say what the records of a file say")
    options = parser.parse_args()
    try:
        if options.summary:
            measured = records.read(options.summary)
        else:
            measured = _measure(benchmark, options, [parse(text) for text in options.case] if options.case else grid())
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    for line in (*say_more(measured), *benchmark.summary(measured)):
        print(line)
    return 0 if measured else 1


def _measure(benchmark: Benchmark, options: argparse.Namespace, chosen: Sequence[Case]) -> list[records.Record]:
    impls = benchmark.chosen(options.impl)
    if options.peers is not None and not options.peers.is_dir():
        raise UserError(f"--peers {options.peers}: no such folder; benchmarks/peers.py makes it")
    run.require_gpu()
    stamp = records.gpu_stamp(options.commit or commit(), "python " + " ".join(sys.argv))
    print(records.machine(stamp), flush=True)
    workers = session.workers(benchmark.name, impls, options.peers)

    def say(line: str) -> None:
        print(line, flush=True)

    return run.run(benchmark, chosen, workers, stamp, options.minutes, say, options.json).records
