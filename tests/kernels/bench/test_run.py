"""A run over workers that answer without a process."""

from pathlib import Path

import pytest

from thalweg.errors import UserError
from thalweg.kernels.bench import records, run
from thalweg.kernels.bench.index import BENCHMARK
from thalweg.kernels.bench.index.cases import Case
from thalweg.kernels.bench.verb import advice

CASES = [Case(batch, 128, 8192) for batch in (1, 4, 16)]


class FakeWorker:
    """Answers every case with one result, after moving the clock by `seconds`."""

    def __init__(self, impl: str, op: str, us: float, present: bool = True) -> None:
        self.impl, self._op, self._us, self.alive = impl, op, us, present
        self.hello = {"ops": [op] if present else []}
        self.seeds: list[int] = []
        self.seconds, self.now = 0.0, [0.0]
        self.stopped = False

    def start(self) -> None:
        pass

    def wait_until_ready(self) -> list[str]:
        return [] if self.alive else [f"{self.impl} {self._op}: No module named 'peer'"]

    def run(self, case: Case, seed: int):
        if not self.alive:
            return [], []
        self.now[0] += self.seconds
        self.seeds.append(seed)
        result = {"impl": self.impl, "op": self._op, "us": self._us, "error": 0.0, "variant": "v", "variants": {}}
        return [result | {"checked_rows": 1, "scratch_bytes": 0, "sets": 1}], []

    def stop(self) -> None:
        self.stopped = True


def workers() -> list[FakeWorker]:
    return [
        FakeWorker("thalweg", "index_topk", 4.0),
        FakeWorker("deepgemm", "mqa_logits", 3.0),
        FakeWorker("sglang-topk", "topk", 2.0),
        FakeWorker("flashinfer", "topk", 2.0, present=False),
    ]


def test_all_implementations_get_the_same_fresh_seed_at_every_case(tmp_path: Path) -> None:
    fakes, said = workers(), []
    outcome = run.run(BENCHMARK, CASES, fakes, {"gpu": "card"}, None, said.append, tmp_path / "out.jsonl")  # type: ignore[arg-type]
    assert fakes[0].seeds == fakes[1].seeds == fakes[2].seeds
    assert len(set(fakes[0].seeds)) == 3
    assert outcome.absent == ["flashinfer"]
    assert "FAILED flashinfer topk: No module named 'peer'" in said
    assert records.read(tmp_path / "out.jsonl") == outcome.records
    assert len({record["run"] for record in outcome.records}) == 1
    assert all(fake.stopped for fake in fakes)


def test_a_run_stops_in_time_and_names_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes, said = workers(), []
    fakes[0].seconds = 25.0
    monkeypatch.setattr(run.time, "monotonic", lambda: fakes[0].now[0])
    outcome = run.run(BENCHMARK, CASES, fakes, {"gpu": "card"}, 1.0, said.append)  # type: ignore[arg-type]
    # 25 s each: a third case would end at 75 s.
    assert outcome.left_out == CASES[2:]
    assert said[-1] == "left out, out of time: batch=16,keys=128,ceiling=8192,rows=1,k=512"


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    fakes = workers()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/out.jsonl: cannot be written: (Not a directory|File exists)$"):
        run.run(BENCHMARK, CASES, fakes, {"gpu": "card"}, None, print, tmp_path / "file/out.jsonl")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"cannot be read: Is a directory$"):
        run.run(BENCHMARK, CASES, fakes, {"gpu": "card"}, None, print, tmp_path)  # type: ignore[arg-type]
    assert not any(fake.seeds for fake in fakes)


def test_the_advice_names_what_to_enable_why_and_what_to_install() -> None:
    outcome = run.run(BENCHMARK, CASES, workers(), {"gpu": "card"}, None, lambda line: None)  # type: ignore[arg-type]
    lines = advice(BENCHMARK, outcome)
    assert lines[0] == "flashinfer was not measured: it cannot be imported here; install flashinfer-python"
    assert "index_topk: enable thalweg's: 1.25 x the fastest peer (geomean), faster at 3 of 3 points" in lines
    assert "topk: thalweg gave no right result here; keep what you have" in lines


def test_an_unknown_implementation_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UserError, match="'tilelan' is unknown; there are: thalweg, deepgemm, tilelang"):
        BENCHMARK.chosen("thalweg,tilelan")
    assert BENCHMARK.chosen("thalweg, torch") == ["thalweg", "torch"]
