"""A check that lets a wrong result pass is worse than none: every fault here must be found."""

from collections.abc import Callable

import pytest
import torch

from thalweg import ops
from thalweg.kernels.bench.benchmark import Wrong
from thalweg.kernels.bench.index import checks, inputs
from thalweg.kernels.bench.index.cases import Case
from thalweg.kernels.bench.index.inputs import Inputs

CASE = Case(batch=3, keys=700, ceiling=8192, rows=2, k=512)
SHORT = Case(batch=3, keys=70, ceiling=8192, rows=1, k=512)


def make(case: Case) -> Inputs:
    return inputs.make(case, 1, torch.device("cpu"), seed=3)[0]


def selection(i: Inputs) -> dict[str, torch.Tensor]:
    args = (i.q, i.cache, i.weights, i.lengths, i.page_table, i.case.k, i.row_to_request)
    indices, slots = ops.index_topk(*args)
    return {"indices": indices, "slots": slots}


@pytest.mark.parametrize("case", [CASE, SHORT])
def test_what_the_reference_gives_is_right(case: Case) -> None:
    i = make(case)
    i.out.fill_(float("nan"))
    logits = ops.mqa_logits(i.q, i.cache, i.weights, i.lengths, i.page_table, i.row_to_request, out=i.out)
    assert checks.check(i, {"logits": logits}, "mqa_logits") == (0.0, case.total_rows)
    assert checks.check(i, selection(i), "index_topk") == (0.0, case.total_rows)
    assert checks.check(i, {"slots": selection(i)["slots"]}, "index_topk") == (0.0, case.total_rows)
    indices = ops.topk(i.logits, i.lengths, case.k)
    assert checks.check(i, {"indices": indices}, "topk") == (0.0, case.total_rows)


def test_scores_that_were_not_written_or_are_off_are_wrong() -> None:
    i = make(CASE)
    right = ops.mqa_logits(i.q, i.cache, i.weights, i.lengths, i.page_table, i.row_to_request, out=i.out)
    unwritten = right.clone()
    unwritten[4, 699] = float("nan")
    with pytest.raises(Wrong, match="not finite"):
        checks.check(i, {"logits": unwritten}, "mqa_logits")
    off = right.clone()
    off[5, 0] += 1e-3 * right[5, :700].abs().max()
    with pytest.raises(Wrong, match=r"off by 1\.0e-03"):
        checks.check(i, {"logits": off}, "mqa_logits")


def test_an_error_within_the_accumulator_is_measured_and_allowed() -> None:
    i = make(CASE)
    logits = ops.mqa_logits(i.q, i.cache, i.weights, i.lengths, i.page_table, i.row_to_request, out=i.out)
    logits[2, 9] += 2e-4 * logits[2, :700].abs().max()
    error, _ = checks.check(i, {"logits": logits}, "mqa_logits")
    assert error == pytest.approx(2e-4, rel=0.01)


def _drop(indices: torch.Tensor) -> None:
    indices[0, 0] = -1


def _twice(indices: torch.Tensor) -> None:
    indices[1, 0] = indices[1, 1]


def _past_the_length(indices: torch.Tensor) -> None:
    indices[5, 7] = 700


def _poison(indices: torch.Tensor) -> None:
    indices[3] = -7


FAULTS = [
    (_drop, "other than 512"),
    (_twice, "twice"),
    (_past_the_length, "other than 512"),
    (_poison, "other than 512"),
]


@pytest.mark.parametrize(("spoil", "said"), FAULTS)
@pytest.mark.parametrize("op", ["topk", "index_topk"])
def test_a_selection_with_a_fault_is_wrong(spoil: Callable[[torch.Tensor], None], said: str, op: str) -> None:
    i = make(CASE)
    indices = ops.topk(i.logits, i.lengths, CASE.k) if op == "topk" else selection(i)["indices"]
    spoil(indices)
    with pytest.raises(Wrong, match=said):
        checks.check(i, {"indices": indices}, op)


@pytest.mark.parametrize("op", ["topk", "index_topk"])
def test_a_selection_that_misses_the_best_entry_is_wrong(op: str) -> None:
    i = make(CASE)
    indices = ops.topk(i.logits, i.lengths, CASE.k) if op == "topk" else selection(i)["indices"]
    worst = torch.tensor(sorted(set(range(700)) - set(indices[2].tolist()))[0])
    indices[2, int((indices[2] == indices[2, 0]).nonzero())] = worst
    with pytest.raises(Wrong, match="off by"):
        checks.check(i, {"indices": indices}, op)


def test_too_many_entries_in_a_short_row_are_wrong() -> None:
    i = make(SHORT)
    indices = ops.topk(i.logits, i.lengths, SHORT.k)
    indices[0, 70] = 70
    with pytest.raises(Wrong, match="other than 70"):
        checks.check(i, {"indices": indices}, "topk")


def test_slots_of_another_request_or_other_entries_are_wrong() -> None:
    i = make(CASE)
    outputs = selection(i)
    foreign = outputs["slots"].clone()
    foreign[0] = outputs["slots"][-1]
    with pytest.raises(Wrong, match="not on a page"):
        checks.check(i, {"slots": foreign}, "index_topk")
    rolled = outputs["slots"].roll(1, dims=1)
    with pytest.raises(Wrong, match="not those of the indices"):
        checks.check(i, {"indices": outputs["indices"], "slots": rolled}, "index_topk")


def test_large_cases_are_checked_on_some_rows_the_first_and_last_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SCORES_CHECKED", 3 * 700)
    rows = checks.sample_rows(make(CASE))
    assert rows.numel() <= 3
    assert {0, 5} <= set(rows.tolist())
