"""The attention kernel for Hopper gives what the reference gives, and a row's bits whatever stands beside it."""

import dataclasses

import pytest
import torch

from tests.ops.attention_kernels import DEVICE, Inputs, agrees
from tests.ops.test_sparse_mla_gpu_kernels import large
from thalweg.ops.cuda import hopper_unsupported

_reason = hopper_unsupported(DEVICE)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_reason is not None, reason=str(_reason))]


def check(inputs: Inputs, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
    got = inputs.run("hopper", **options)
    agrees(got, inputs.run("reference"))
    return got


@pytest.mark.parametrize("heads", [1, 8, 16, 64, 96, 128])
@pytest.mark.parametrize("rows", [1, 5, 70, 150])
@pytest.mark.parametrize("layout", ["v4", "v32"])
def test_heads_rows_and_lengths(layout: str, rows: int, heads: int) -> None:
    inputs = large(layout, rows, heads, 128, 512)
    check(inputs)
    inputs.lengths = torch.arange(rows, device=DEVICE) * 37 % 129
    inputs.extra = (*inputs.extra[:2], (torch.arange(rows, device=DEVICE) * 101 % 600 - 40).int())
    check(inputs)


@pytest.mark.parametrize("page_slots", [1, 2, 16, 61, 64, 256])
@pytest.mark.parametrize("width", [64, 133, 1152, 2051, 8320])
@pytest.mark.parametrize("layout", ["v4", "v32"])
def test_lists_of_any_width_and_pages_of_any_size(layout: str, width: int, page_slots: int) -> None:
    inputs = large(layout, 3, 64, width, 0, page_slots, pages=max(4, 2000 // page_slots))
    inputs.indices[:, 5::7] = -1
    inputs.indices[0] = -1
    out, lse = check(inputs)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()


@pytest.mark.parametrize("layout", ["v4", "v32"])
def test_twenty_runs_give_the_same_bits(layout: str) -> None:
    """Teams hand tiles to one another through shared memory: what was read too early would differ from run to run."""
    inputs = large(layout, 132, 64, 128, 2048, pages=4000)
    out, lse = check(inputs)
    for _ in range(20):
        again, again_lse = inputs.run("hopper")
        assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_a_captured_graph_takes_other_lengths() -> None:
    """Kernels that overlap are captured with what orders them."""
    inputs = large("v4", 16, 64, 128, 512)
    inputs.lengths = torch.full((16,), 128, device=DEVICE, dtype=torch.int32)
    inputs.on_device("hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = inputs.on_device("hopper")
    inputs.lengths.copy_(torch.arange(16, device=DEVICE) * 8)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    agrees(tuple(each.cpu() for each in got), inputs.run("reference"))


def test_no_sink_and_a_sink_that_is_nothing() -> None:
    inputs = large("v4", 4, 64, 128, 512)
    for sink in (None, torch.full((64,), -torch.inf, device=DEVICE)):
        check(dataclasses.replace(inputs, sink=sink))


@pytest.mark.parametrize("layout", ["v4", "v32"])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(layout: str) -> None:
    inputs = large(layout, 64, 64, 128, 512)
    out, lse = check(inputs, deterministic=True)
    for row in (0, 31, 63):
        one_out, one_lse = inputs.part(slice(row, row + 1)).run("hopper", deterministic=True)
        assert torch.equal(one_out[0], out[row]) and torch.equal(one_lse[0], lse[row])
