"""The attention kernel for Hopper, its source run on the CPU (emulated/), gives what the reference gives."""

import pytest
import torch

from tests.ops import emulated
from tests.ops.attention_kernels import SCALE, Inputs, agrees, made
from thalweg.ops.cuda import CudaVariant
from thalweg.ops.sparse_mla import hopper

pytestmark = pytest.mark.skipif(emulated.MISSING is not None, reason=str(emulated.MISSING))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaVariant, "launch", emulated.launch)


def run(inputs: Inputs, deterministic: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (inputs.q, inputs.cache, inputs.indices, inputs.lengths, inputs.sink, *(inputs.extra or (None,) * 3))
    assert hopper.rejects(*arguments, SCALE, deterministic) is None
    return hopper.sparse_mla(*arguments, SCALE, deterministic)


@pytest.mark.parametrize(("page_slots", "heads", "deterministic"), [(64, 16, True), (2, 70, False)])
@pytest.mark.parametrize("layout", ["v4", "v32"])
def test_two_lists_with_holes_and_lengths(page_slots: int, heads: int, deterministic: bool, layout: str) -> None:
    """deterministic: in several splits, which the Triton kernel merges."""
    inputs = made(layout, 2, heads, 200, 150, page_slots=page_slots)
    inputs.indices[:, 3::5] = -1
    inputs.indices[0, 7] = inputs.cache.shape[0] * inputs.cache.shape[1] + 3
    inputs.lengths = torch.tensor([200, 71])
    inputs.extra = (*inputs.extra[:2], torch.tensor([149, 0]))
    agrees(run(inputs, deterministic), inputs.run("reference"))


@pytest.mark.parametrize("layout", ["v4", "v32"])
def test_more_tiles_than_are_known_ahead(layout: str) -> None:
    inputs = made(layout, 1, 3, 700)
    agrees(run(inputs), inputs.run("reference"))


def test_a_row_of_nothing_is_zero_whatever_its_queries_hold() -> None:
    inputs = made("v4", 2, 16, 64)
    inputs.indices[0] = -1
    inputs.q[0] = float("nan")
    out, lse = run(inputs)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all() and (out[1] != 0).any()
