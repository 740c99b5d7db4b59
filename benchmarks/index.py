"""The lightning indexer on a GPU: index_topk, mqa_logits and topk of Thalweg against DeepGEMM, TileLang and GPU top-ks.

    python benchmarks/index.py --peers .peers --json benchmarks/results/h200/index.jsonl          # the whole grid
    python benchmarks/index.py --peers .peers --case batch=64,keys=32768,ceiling=131072,rows=1    # one case (repeatable)
    python benchmarks/index.py --minutes 8 --json FILE                                            # stops in time
    python benchmarks/index.py --summary FILE                                                     # what the records say

`--peers` names the folder that `benchmarks/peers.py` made; without it peers come from this environment. Every implementation
runs in its own process. A time is the median of CUDA-graph replays over inputs that do not stay in the L2, and stands only
where the result is right: scores within 5e-4 of float64 on the same bytes, selections exact, lengths honoured.
"""

import sys

from against_peers import main as against_peers  # beside this file

from thalweg.kernels.bench.index import BENCHMARK, cases, summary


def main() -> int:
    return against_peers(BENCHMARK, __doc__.splitlines()[0], cases.parse, cases.grid, summary.scratch_table)


if __name__ == "__main__":
    sys.exit(main())
