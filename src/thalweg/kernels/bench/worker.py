"""The process of one implementation: reads cases as JSON lines, answers each with a line. A crash here is one line there.

    python -m thalweg.kernels.bench.worker IMPL

The first line it writes says that it is ready, or which of its operations could not be imported.
"""

import gc
import json
import os
import sys
from typing import IO, Any

import torch

from thalweg.kernels.bench import adapters
from thalweg.kernels.bench.cases import Case
from thalweg.kernels.bench.clock import GraphClock, e4m3_flop_per_second
from thalweg.kernels.bench.measure import Unusable, measure, one_line


def main() -> int:
    impl = sys.argv[1]
    # Peers and compilers print: answers get a channel of their own, and file descriptor 1 becomes stderr.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        return serve(impl, answers)


def serve(impl: str, answers: IO[str]) -> int:
    device = torch.device("cuda", 0)
    clock = GraphClock()
    loaded, failures = [], []
    kept: dict[str, int] = {}
    for adapter in adapters.of(impl):
        try:
            loaded.append((adapter, adapter.load()))
        except Exception as error:
            failures.append(f"{impl} {adapter.op}: {one_line(error)}")
    hello: dict[str, Any] = {"ops": [adapter.op for adapter, _ in loaded], "failures": failures}
    if impl == "thalweg":
        try:
            hello["e4m3_flop_per_second"] = e4m3_flop_per_second()
        except RuntimeError as error:
            failures.append(f"the e4m3 rate of this card: {one_line(error)}")
    print(json.dumps(hello), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = measure(loaded, Case(**request["case"]), device, request["seed"], clock, kept)
        except Unusable as error:
            print(json.dumps(error.answer.to_json()), file=answers)
            return 1
        print(json.dumps(answer.to_json()), file=answers)
        gc.collect()
        torch.cuda.empty_cache()  # the other processes need it
    return 0


if __name__ == "__main__":
    sys.exit(main())
