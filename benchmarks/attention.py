"""Attention over index lists on a GPU: sparse_mla of Thalweg against FlashMLA and SGLang's two Triton kernels.

    python benchmarks/attention.py --peers .peers-attention --json benchmarks/results/h200/attention.jsonl     # the whole grid
    python benchmarks/attention.py --peers .peers-attention --minutes 4       # stops in time; the telling points come first
    python benchmarks/attention.py --peers DIR --case batch=64,heads=64,entries=640,layout=v4     # one case (repeatable)
    python benchmarks/attention.py --peers DIR --case rows=4096,heads=64,entries=640              # a chunk of prefill
    python benchmarks/attention.py --summary FILE                                                 # what the records say

`--peers` names the folder that `benchmarks/peers.py --only attention` made; without it peers come from this environment. Every
implementation runs in its own process. A time is the median of CUDA-graph replays over inputs that do not stay in the L2, and
stands only where the result is right: within 1e-3 or 2.01/128 and a cosine distance of 5e-6 of float64 on the same bytes.

v4: 128 entries of a row lie in the window's cache (pages of 256 slots), up to 512 others in a c4 cache (pages of 64), more in a
c128 cache (pages of 2). v32: one cache. Decode: slots at random, none read twice. Prefill: windows that slide, of the c4 entries
of 131,072 tokens a random choice for each row, c128 entries the same for all rows.
"""

import sys

from against_peers import main as against_peers  # beside this file

from thalweg.kernels.bench.attention import BENCHMARK, cases


def main() -> int:
    return against_peers(BENCHMARK, __doc__.splitlines()[0], cases.parse, cases.grid)


if __name__ == "__main__":
    sys.exit(main())
