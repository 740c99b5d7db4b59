"""The loop of a worker, on the CPU with a clock that runs calls as they are."""

import io
import json
import sys

import pytest
import torch

from thalweg.kernels.bench import worker
from thalweg.kernels.bench.benchmark import named
from thalweg.kernels.bench.clock import Call, Outputs

CPU = torch.device("cpu")
CASES = {
    "index": {"batch": 1, "keys": 128, "ceiling": 8192, "rows": 1, "k": 512},
    "attention": {"batch": 1, "heads": 8, "entries": 128, "layout": "v4"},
}


class Clock:
    def usable(self) -> bool:
        return True

    def retained_bytes(self) -> int:
        return 0

    def scratch_bytes(self, call: Call) -> int:
        return 0

    def replayed(self, call: Call) -> Outputs:
        return call()

    def median_us(self, calls: list[Call]) -> float:
        return float(len(calls))


def served(benchmark: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What a worker answers: its first line, and its answer to one case."""
    monkeypatch.setattr(torch, "device", lambda *given: CPU)
    monkeypatch.setattr(worker, "GraphClock", Clock)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"case": CASES[benchmark], "seed": 1}) + "\n"))
    answers = io.StringIO()
    assert worker.serve(named(benchmark), impl, answers) == 0
    return [json.loads(line) for line in answers.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("benchmark", "ops"), [("index", ["mqa_logits", "topk", "index_topk"]), ("attention", ["sparse_mla"])]
)
def test_ours_serves_every_operation_of_a_benchmark(benchmark: str, ops: list[str], monkeypatch) -> None:
    hello, answer = served(benchmark, "thalweg", monkeypatch)
    assert hello["ops"] == ops
    assert [result["op"] for result in answer["results"]] == ops
    assert answer["failures"] == []


def test_a_peer_that_is_not_there_has_no_operation_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    hello, answer = served("attention", "flashmla", monkeypatch)
    assert hello == {"ops": [], "failures": ["flashmla sparse_mla: ModuleNotFoundError: No module named 'flash_mla'"]}
    assert answer == {"results": [], "failures": []}
