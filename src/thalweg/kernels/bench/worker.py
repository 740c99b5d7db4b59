"""The process of one implementation: reads cases as JSON lines, answers each with a line. A crash here is one line there.

    python -m thalweg.kernels.bench.worker BENCHMARK IMPL

The first line it writes says that it is ready, or which of its operations could not be imported.
"""

import gc
import json
import os
import sys
from typing import IO, Any

import torch

from thalweg.kernels.bench.benchmark import Benchmark, named
from thalweg.kernels.bench.clock import GraphClock
from thalweg.kernels.bench.measure import Unusable, measure, one_line


def main() -> int:
    benchmark, impl = named(sys.argv[1]), sys.argv[2]
    # Peers and compilers print: answers get a channel of their own, and file descriptor 1 becomes stderr.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        return serve(benchmark, impl, answers)


def serve(benchmark: Benchmark, impl: str, answers: IO[str]) -> int:
    device = torch.device("cuda", 0)
    clock = GraphClock()
    loaded, failures = [], []
    kept: dict[str, int] = {}
    for adapter in benchmark.adapters_of(impl):
        try:
            loaded.append((adapter, adapter.load()))
        except Exception as error:
            failures.append(f"{impl} {adapter.op}: {one_line(error)}")
    hello: dict[str, Any] = {"ops": [adapter.op for adapter, _ in loaded], "failures": failures}
    if impl == "thalweg" and benchmark.rate is not None:
        try:
            hello["flop_per_second"] = benchmark.rate.measure()
        except RuntimeError as error:
            failures.append(f"the rate of {benchmark.rate.name} on this card: {one_line(error)}")
    print(json.dumps(hello), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = measure(
                benchmark, loaded, benchmark.case_of(request["case"]), device, request["seed"], clock, kept
            )
        except Unusable as error:
            print(json.dumps(error.answer.to_json()), file=answers)
            return 1
        print(json.dumps(answer.to_json()), file=answers)
        gc.collect()
        torch.cuda.empty_cache()  # the other processes need it
    return 0


if __name__ == "__main__":
    sys.exit(main())
