"""The lightning indexer on a GPU: index_topk, mqa_logits and topk of Thalweg against DeepGEMM, TileLang and GPU top-ks.

    python benchmarks/index.py --peers .peers --json benchmarks/results/h200/index.jsonl          # the whole grid
    python benchmarks/index.py --peers .peers --case batch=64,keys=32768,ceiling=131072,rows=1    # one case (repeatable)
    python benchmarks/index.py --minutes 8 --json FILE                                            # stops in time
    python benchmarks/index.py --summary FILE                                                     # what the records say

`--peers` names the folder that `benchmarks/peers.py` made; without it peers come from this environment. Every implementation
runs in its own process. A time is the median of CUDA-graph replays over inputs that do not stay in the L2, and stands only
where the result is right: scores within 5e-4 of float64 on the same bytes, selections exact, lengths honoured.
"""

import argparse
import sys
from pathlib import Path

from stamp import commit  # beside this file

from thalweg.errors import UserError
from thalweg.kernels.bench import cases, records, run, session, summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", metavar="KEY=VALUE,...", help="a case instead of the default grid")
    parser.add_argument("--impl", metavar="NAMES", help="for example thalweg,deepgemm,sglang-topk (default: all)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder that benchmarks/peers.py made")
    parser.add_argument("--minutes", type=float, help="stop in time and say what was left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the records into this file after every case")
    parser.add_argument("--commit", help="what to stamp where this is a copy without git")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="only say what the records of a file say")
    options = parser.parse_args()
    try:
        return report(records.read(options.summary)) if options.summary else measure(options)
    except UserError as error:
        print(f"index.py: {error}", file=sys.stderr)
        return 2


def measure(options: argparse.Namespace) -> int:
    chosen = [cases.parse(text) for text in options.case] if options.case else cases.grid()
    impls = run.chosen(options.impl)
    if options.peers is not None and not options.peers.is_dir():
        raise UserError(f"--peers {options.peers}: no such folder; benchmarks/peers.py makes it")
    run.require_gpu()
    stamp = records.gpu_stamp(options.commit or commit(), "python " + " ".join(sys.argv))
    print(records.machine(stamp), flush=True)
    workers = session.workers(impls, options.peers)
    outcome = run.run(chosen, workers, stamp, options.minutes, lambda line: print(line, flush=True), options.json)
    return report(outcome.records)


def report(measured: list[records.Record]) -> int:
    for line in (*summary.scratch_table(measured), *summary.lines(measured)):
        print(line)
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
