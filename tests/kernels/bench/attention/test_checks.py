"""A check that lets a wrong result pass is worse than none: every fault here must be found."""

import math
from collections.abc import Callable

import pytest
import torch

from thalweg import ops
from thalweg.kernels.bench.attention import checks, inputs
from thalweg.kernels.bench.attention.cases import Case, Decode, Prefill
from thalweg.kernels.bench.attention.inputs import Inputs
from thalweg.kernels.bench.benchmark import Wrong

CASE = Decode(3, 8, 192)
CASES = [CASE, Decode(2, 16, 128), Decode(2, 8, 192, "v32"), Prefill(4, 8, 192), Prefill(3, 8, 1152)]


def make(case: Case) -> Inputs:
    return inputs.make(case, 1, torch.device("cpu"), seed=3)[0]


def attended(i: Inputs, **instead: object) -> dict[str, torch.Tensor]:
    """What the reference gives, or would give for other arguments."""
    given = {"q": i.q, "cache": i.cache, "indices": i.indices, "lengths": i.lengths, "sink": i.sink, "extra": i.extra}
    out, lse = ops.sparse_mla(**{**given, "scale": i.scale, **instead})  # type: ignore[arg-type]
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("case", CASES)
def test_what_the_reference_gives_is_right_and_its_rounding_is_the_error(case: Case) -> None:
    i = make(case)
    error, rows = checks.check(i, attended(i), "sparse_mla")
    assert 0 < error < 2**-7  # bf16, relative to the largest of a head
    assert rows == case.rows


def test_the_statistics_of_peers_are_held_to_what_they_mean() -> None:
    i = make(CASE)
    outputs = attended(i)
    lse = outputs.pop("lse")
    in_base_2 = {**outputs, "lse_log2": lse / math.log(2)}
    with_sink = {**outputs, "lse_with_sink": torch.logaddexp(lse, i.sink.expand_as(lse))}
    assert checks.check(i, in_base_2, "sparse_mla") == checks.check(i, with_sink, "sparse_mla")
    for name in checks.LSE_NAMES:
        with pytest.raises(Wrong, match=f"{name} is off"):
            checks.check(i, {**outputs, name: lse * 1.001 + 0.01}, "sparse_mla")
    with pytest.raises(Wrong, match="lse of shape"):
        checks.check(i, {**outputs, "lse": lse.unsqueeze(1)}, "sparse_mla")


def _unwritten(outputs: dict[str, torch.Tensor]) -> None:
    outputs["out"][2, 7, 511] = float("nan")


def _unwritten_lse(outputs: dict[str, torch.Tensor]) -> None:
    outputs["lse"][2, 7] = float("nan")


def _one_element(outputs: dict[str, torch.Tensor]) -> None:
    outputs["out"][1, 3, 100] += 0.02


def _everywhere_a_little(outputs: dict[str, torch.Tensor]) -> None:
    outputs["out"].mul_(1 + 2**-7)  # within the bounds of an element


def _rows_swapped(outputs: dict[str, torch.Tensor]) -> None:
    outputs["out"][[0, 1]] = outputs["out"][[1, 0]]


def _narrow(outputs: dict[str, torch.Tensor]) -> None:
    outputs["out"] = outputs["out"][:, :7]


FAULTS = [
    (_unwritten, "1 of 12288 of out are not finite"),
    (_unwritten_lse, "of lse are not finite"),
    (_one_element, "1 of 12288 elements are off, by 2"),
    (_everywhere_a_little, "cosine distance"),
    (_rows_swapped, "elements are off"),
    (_narrow, "a result of torch.bfloat16"),
]


@pytest.mark.parametrize(("spoil", "said"), FAULTS)
def test_a_result_with_a_fault_is_wrong(spoil: Callable[[dict[str, torch.Tensor]], None], said: str) -> None:
    i = make(CASE)
    outputs = attended(i)
    spoil(outputs)
    with pytest.raises(Wrong, match=said):
        checks.check(i, outputs, "sparse_mla")


@pytest.mark.parametrize("case", [CASE, Prefill(4, 8, 192)])
@pytest.mark.parametrize("fault", ["sink", "extra", "last entry", "scale"])
def test_a_part_of_the_arguments_that_was_ignored_is_found(case: Case, fault: str) -> None:
    i = make(case)
    instead = {
        "sink": {"sink": None},
        "extra": {"extra": None},
        "last entry": {"lengths": i.lengths - 1},
        "scale": {"scale": i.scale * 1.01},
    }[fault]
    outputs = attended(i, **instead)
    with pytest.raises(Wrong):
        checks.check(i, outputs, "sparse_mla")


def test_large_cases_are_checked_on_some_rows_the_first_and_last_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ENTRIES_CHECKED", 3 * 128)
    rows = checks.sample_rows(make(Decode(9, 8, 128)))
    assert rows.numel() <= 3
    assert {0, 8} <= set(rows.tolist())
