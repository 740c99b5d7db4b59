import pytest

from thalweg.kernels.bench.attention import BENCHMARK, summary
from thalweg.kernels.bench.attention.cases import Case, Decode, Prefill
from thalweg.kernels.bench.records import Record

STAMP = {"commit": "abc", "gpu": "NVIDIA H200", "date": "2026-11-30"}


def result(impl: str, us: float) -> dict:
    extra = {"variant": "v", "variants": {"v": us}, "checked_rows": 32, "scratch_bytes": 0, "sets": 2}
    return {"impl": impl, "op": "sparse_mla", "us": us, "error": 1e-3, **extra}


def run_of(case: Case, run: str = "a", **times: float) -> list[Record]:
    """Records of a run: times by implementation name with _ for -."""
    results = [result(name.replace("_", "-"), us) for name, us in times.items()]
    return BENCHMARK.records_of(case, results, {"run": run, **STAMP}, None)


def test_a_record_says_what_the_schema_asks() -> None:
    (decode,) = run_of(Decode(64, 16, 640), thalweg=12.3456)
    wanted = {"bench": "attention", "op": "sparse_mla", "impl": "thalweg", "us": 12.346, "error": 1e-3, "ok": True}
    assert {name: decode[name] for name in wanted} == wanted
    assert decode["case"] == {"batch": 64, "heads": 16, "entries": 640, "layout": "v4"}
    assert decode["floor_us"] == round(Decode(64, 16, 640).floor_us("sparse_mla"), 3)
    assert decode["floor_tflops"] == 790.0
    (prefill,) = run_of(Prefill(4096, 64, 640), thalweg=900.0)
    assert (prefill["bench"], prefill["case"]) == ("prefill", {"rows": 4096, "heads": 64, "entries": 640})
    assert BENCHMARK.case_of(prefill["case"]) == Prefill(4096, 64, 640)


def test_a_point_is_held_to_the_fastest_peer_and_to_each() -> None:
    (point,) = summary.points(run_of(Decode(64, 64, 640), thalweg=10, flashmla=15, sglang_splitk=12))[0]
    assert (point.best, point.ratio("sglang-splitk"), point.ratio("flashmla")) == ("sglang-splitk", 1.2, 1.5)
    assert summary.lines(run_of(Decode(64, 64, 640), thalweg=10, flashmla=15, sglang_splitk=12)) == [
        "batch=64,heads=64,entries=640,layout=v4: 10.00 us, best peer sglang-splitk 12.00 us, 1.200 x",
        "64 heads, against the best peer: geomean 1.200 x over 1 points, lowest 1.200 x, highest 1.200 x",
        "64 heads, against flashmla: geomean 1.500 x over 1 points, lowest 1.500 x, highest 1.500 x",
        "64 heads, against sglang-splitk: geomean 1.200 x over 1 points, lowest 1.200 x, highest 1.200 x",
    ]


def test_times_of_different_runs_are_not_compared() -> None:
    measured = run_of(Decode(1, 64, 640), thalweg=10) + run_of(Decode(1, 64, 640), run="b", flashmla=15)
    counted, left_out = summary.points(measured)
    assert counted == []
    assert left_out == [(Decode(1, 64, 640), "no peer ran in the same run")]
    alone = summary.points(run_of(Decode(1, 64, 640), flashmla=15))
    assert alone == ([], [(Decode(1, 64, 640), "thalweg did not run")])


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        (Decode(64, 64, 640), {"64 heads"}),
        (Decode(64, 64, 2048, "v32"), {"64 heads"}),
        (Decode(64, 64, 8320), {"64 heads", "HCA, 64 heads"}),
        (Decode(64, 64, 1152), {"64 heads", "HCA, 64 heads"}),
        (Decode(64, 8, 8320), {"8 and 16 heads"}),
        (Decode(64, 16, 640), {"8 and 16 heads"}),
        (Decode(64, 128, 640), {"other decode"}),
        (Prefill(4096, 64, 1152), {"prefill"}),
    ],
)
def test_every_case_is_in_its_groups(case: Case, groups: set[str]) -> None:
    lines = summary.lines(run_of(case, thalweg=10, flashmla=15))
    assert {line.split(", against")[0] for line in lines if "against the best peer" in line} == groups


def test_means_are_geometric_and_name_the_lowest() -> None:
    measured = run_of(Decode(1, 8, 640), thalweg=10, flashmla=40) + run_of(Decode(4, 8, 640), thalweg=10, flashmla=10)
    assert "8 and 16 heads, against flashmla: geomean 2.000 x over 2 points, lowest 1.000 x, highest 4.000 x" in (
        summary.lines(measured)
    )


def test_records_of_other_benchmarks_do_not_count() -> None:
    other = [{**record, "bench": "index"} for record in run_of(Decode(1, 8, 640), thalweg=10, flashmla=40)]
    assert summary.lines(other) == ["no point counts: needs thalweg and a peer in one run"]
