"""The benchmark of the lightning indexer: mqa_logits, topk and index_topk against peers that score and peers that select."""

from thalweg.kernels.bench.benchmark import Benchmark, Rate
from thalweg.kernels.bench.clock import e4m3_flop_per_second
from thalweg.kernels.bench.index import adapters, cases, checks, inputs, pairs, summary

BENCHMARK = Benchmark(
    name="index",
    adapters=adapters.ADAPTERS,
    case_of=lambda fields: cases.Case(**fields),
    make_inputs=inputs.sets,
    check=checks.check,
    records_of=pairs.records_of,
    summary=summary.lines,
    telling=cases.TELLING,
    rate=Rate("e4m3 products", e4m3_flop_per_second),
)
