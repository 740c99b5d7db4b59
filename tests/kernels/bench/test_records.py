import json
from pathlib import Path

import pytest

from thalweg.errors import UserError
from thalweg.kernels.bench import records
from thalweg.kernels.bench.index import pairs, summary
from thalweg.kernels.bench.index.cases import Case

CASE = Case(64, 32768, 131072)
STAMP = {"run": "a", "commit": "abc", "gpu": "NVIDIA H200", "date": "2026-11-30"}


def result(impl: str, op: str, us: float, scratch: int = 0) -> dict:
    extra = {"variant": "v", "variants": {"v": us}, "checked_rows": 32, "scratch_bytes": scratch, "sets": 2}
    return {"impl": impl, "op": op, "us": us, "error": 1e-7, **extra}


def run_of(case: Case, ours: float, run: str = "a", **times: float) -> list[records.Record]:
    """Records of a run: `scorer` and `selector` times by implementation name with _ for -."""
    ops = {"deepgemm": "mqa_logits", "tilelang": "mqa_logits"}
    results = [result("thalweg", "index_topk", ours, scratch=4096)]
    results += [result(name.replace("_", "-"), ops.get(name, "topk"), us) for name, us in times.items()]
    return pairs.records_of(case, results, {**STAMP, "run": run}, None)


def test_a_record_says_what_the_schema_asks() -> None:
    first = run_of(CASE, 78.1234)[0]
    wanted = {"bench": "index", "op": "index_topk", "impl": "thalweg", "us": 78.123, "error": 1e-7, "ok": True, **STAMP}
    assert {name: first[name] for name in wanted} == wanted
    assert first["case"] == {"batch": 64, "keys": 32768, "ceiling": 131072, "rows": 1, "k": 512}
    assert first["floor_us"] == round(CASE.floor_us("index_topk"), 3)
    assert first["floor_tflops"] == 790.0


def test_a_pair_is_the_sum_of_scoring_and_selection() -> None:
    made = run_of(CASE, 70, deepgemm=74.5, tilelang=90, sglang_topk=20, torch=68)
    pairs = {record["impl"]: record["us"] for record in made if "+" in record["impl"]}
    assert pairs == {
        "deepgemm+sglang-topk": 94.5,
        "deepgemm+torch": 142.5,
        "tilelang+sglang-topk": 110,
        "tilelang+torch": 158,
    }


def test_the_newest_run_of_a_case_replaces_the_older_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "h200/index.jsonl"
    records.merge(file, run_of(CASE, 80) + run_of(Case(1, 128, 8192), 5))
    records.merge(file, run_of(CASE, 70, run="b"))
    other_card = [{**record, "gpu": "other"} for record in run_of(CASE, 200)]
    records.merge(file, other_card)
    assert [(r["us"], r["gpu"]) for r in records.read(file)] == [
        (70, "NVIDIA H200"),
        (5, "NVIDIA H200"),
        (200, "other"),
    ]
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("hello\n")
    with pytest.raises(UserError, match="not a file of benchmark records"):
        records.merge(file, run_of(CASE, 80))
    assert file.read_text() == "hello\n"


def test_a_point_counts_only_with_a_scorer_and_a_gpu_topk_beside_torch() -> None:
    only_torch = run_of(Case(1, 128, 8192), 5, deepgemm=5, torch=1)
    no_scorer = run_of(Case(4, 128, 8192), 5, sglang_topk=2, torch=1)
    full = run_of(CASE, 70, deepgemm=74.5, sglang_topk=20, flashinfer=15)
    counted, left_out = summary.points(only_torch + no_scorer + full)
    (point,) = counted
    assert (point.peer, point.peer_us) == ("deepgemm+flashinfer", 89.5)
    assert point.ratio == pytest.approx(89.5 / 70)
    assert [case.batch for case, _ in left_out] == [1, 4]


def test_times_of_different_runs_are_not_compared(tmp_path: Path) -> None:
    file = tmp_path / "index.jsonl"
    records.merge(file, run_of(CASE, 70, deepgemm=74.5, sglang_topk=20))
    records.merge(file, run_of(CASE, 60, run="b"))
    counted, left_out = summary.points(records.read(file))
    assert counted == []
    assert len(left_out) == 1


def test_the_summary_names_lost_points_and_the_mean() -> None:
    won = run_of(CASE, 50, deepgemm=80, sglang_topk=20)
    lost = run_of(Case(1, 128, 8192), 10, deepgemm=3, sglang_topk=2)
    text = summary.lines(won + lost)
    assert text[0].startswith(
        "lost: batch=1,keys=128,ceiling=8192,rows=1,k=512: 10.00 us, deepgemm+sglang-topk 5.00 us"
    )
    assert text[-1].startswith("index_topk against the fastest pair: geomean 1.000 x over 2 points, lowest 0.500 x")


def test_scratch_is_a_table_of_keys_and_ceilings() -> None:
    measured = [record for ceiling in (131072, 1048576) for record in run_of(Case(64, 32768, ceiling), 70)]
    assert summary.scratch_table(measured)[1].split() == ["131,072", "1,048,576"]
    assert summary.scratch_table(measured)[2].split() == ["32,768", "4,096", "4,096"]
