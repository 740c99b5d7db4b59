"""The benchmark of attention over index lists: decode rows and chunks of prefill against FlashMLA and SGLang's Triton kernels."""

from thalweg.kernels.bench import records
from thalweg.kernels.bench.attention import adapters, cases, checks, inputs, summary
from thalweg.kernels.bench.benchmark import Benchmark

BENCHMARK = Benchmark(
    name="attention",
    adapters=adapters.ADAPTERS,
    case_of=cases.case_of,
    make_inputs=inputs.sets,
    check=checks.check,
    records_of=records.records_of,
    summary=summary.lines,
    telling=cases.TELLING,
)
