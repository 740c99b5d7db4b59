"""`thalweg kernels bench` over benchmarks whose workers answer without a process."""

import argparse
from pathlib import Path

import pytest

from thalweg.kernels.bench import records, run, session, verb


class FakeWorker:
    """Answers every case of a benchmark with its operations at fixed times."""

    def __init__(self, benchmark: str, impl: str) -> None:
        self.impl, self.alive = impl, True
        self._ops = {
            ("index", "thalweg"): {"index_topk": 4.0},
            ("index", "deepgemm"): {"mqa_logits": 3.0},
            ("index", "sglang-topk"): {"topk": 2.0},
            ("attention", "thalweg"): {"sparse_mla": 8.0},
            ("attention", "flashmla"): {"sparse_mla": 12.0},
        }.get((benchmark, impl), {})
        self.alive = bool(self._ops)
        self.hello = {"ops": list(self._ops)}

    def start(self) -> None:
        pass

    def wait_until_ready(self) -> list[str]:
        return []

    def run(self, case: object, seed: int):
        extra = {"error": 0.0, "variant": "v", "variants": {}, "checked_rows": 1, "scratch_bytes": 0, "sets": 1}
        return [{"impl": self.impl, "op": op, "us": us, **extra} for op, us in self._ops.items()], []

    def stop(self) -> None:
        pass


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs with fakes; gives the minutes that each benchmark got."""
    given: list[float] = []
    run_theirs = run.run

    def noted(benchmark, cases, workers, stamp, share, say, into):
        given.append(share)
        return run_theirs(benchmark, cases, workers, stamp, share, say, into)

    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(run, "run", noted)
    monkeypatch.setattr(records, "gpu_stamp", lambda commit, command: {"gpu": "card", "torch": "", "triton": ""})
    monkeypatch.setattr(records, "machine", lambda stamp: "card")
    monkeypatch.setattr(
        session, "workers", lambda benchmark, impls, peers: [FakeWorker(benchmark, impl) for impl in impls]
    )
    return given


def test_the_verb_measures_the_index_and_attention_and_advises_on_each(
    minutes: list[float], tmp_path: Path, capsys
) -> None:
    assert verb.main(argparse.Namespace(minutes=5.0, json=tmp_path / "out.jsonl")) == 0
    said = capsys.readouterr().out.splitlines()
    assert "index_topk: enable thalweg's: 1.25 x the fastest peer (geomean), faster at 7 of 7 points" in said
    assert "sparse_mla: enable thalweg's: 1.50 x the fastest peer (geomean), faster at 25 of 25 points" in said
    assert "sglang-splitk was not measured: it cannot be imported here; install sglang" in said
    assert {record["bench"] for record in records.read(tmp_path / "out.jsonl")} == {"index", "attention", "prefill"}


def test_what_the_index_leaves_of_the_time_is_for_attention(minutes: list[float]) -> None:
    verb.main(argparse.Namespace(minutes=5.0, json=None))
    assert minutes == pytest.approx([2.5, 5.0], abs=0.1)
