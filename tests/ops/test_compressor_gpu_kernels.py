"""The compressor kernel at the sizes it is for: many requests, long chunks, long decode, captured graphs."""

import pytest
import torch

from tests.ops.attention_kernels import DEVICE
from tests.ops.builders import frequencies
from tests.ops.compressor_kernels import Requests
from thalweg.layouts import v4
from thalweg.ops import CompressPlan, compress

pytestmark = pytest.mark.gpu

KINDS = [("v4", 4, False), ("v4", 128, False), ("index_fp8", 4, False), ("index_fp8", 4, True)]


@pytest.mark.parametrize(("layout", "ratio", "hadamard"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_decode_and_verify_rows_on_a_gpu(layout: str, ratio: int, hadamard: bool, dtype: torch.dtype) -> None:
    requests = Requests(ratio, layout, dtype, hadamard, states=64, slots=64 * 600, page_slots=64 if ratio == 4 else 2)
    requests.step((0, 2000), (5, 1), (7, 333), padding=3)
    requests.step(*((slot, 1 + slot % 3) for slot in range(64)))
    for _ in range(6):
        requests.step(*((slot, 1 + slot % 9) for slot in range(64)), padding=1)
    requests.step((0, 300), (1, 129), (2, 127), (3, 1))
    requests.check()


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_ring_is_read_before_it_is_overwritten_on_a_gpu(ratio: int) -> None:
    """Calls whose last rows take the places that their first entries pool: programs run at once here."""
    requests = Requests(ratio, "exact", states=128, slots=128 * 400)
    ring = 8 if ratio == 4 else 128
    for rows in (ring - 1, ring + 1, 2 * ring + 1, ring, 3, ring + 5):
        requests.step(*((slot, rows + slot % 5) for slot in range(128)))
    requests.check()


def test_a_captured_graph_decodes_on_a_gpu() -> None:
    """Field case 9: capture one row of 16 requests, replay 300 steps with padding; the bits of eager calls."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    plan = CompressPlan(*(torch.full((16,), -1, device=DEVICE) for _ in range(3)))
    kv, gate = (torch.zeros(16, 512, device=DEVICE) for _ in range(2))
    ape, norm, f = torch.randn(128, 512, device=DEVICE), torch.randn(512, device=DEVICE), frequencies().to(DEVICE)
    states = [torch.zeros(16, 128, 2, 512, device=DEVICE) for _ in range(2)]
    caches = [v4.allocate(64, 2, DEVICE) for _ in range(2)]

    def step(number: int) -> None:
        compress(kv, gate, states[number], ape, plan, norm, f, caches[number], ratio=128, implementation="triton")

    step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    for token in range(300):
        kv.normal_(generator=generator)
        gate.normal_(generator=generator)
        real = torch.arange(16, device=DEVICE) < 16 - token % 4
        positions = torch.full((16,), token, device=DEVICE)
        plan.positions.copy_(positions)
        plan.state_slots.copy_(torch.where(real, torch.arange(16, device=DEVICE), -1))
        entries = 2 + torch.arange(16, device=DEVICE) * 2 + positions // 128
        plan.cache_slots.copy_(torch.where(positions % 128 == 127, entries, -1))
        graph.replay()
        step(1)
    assert torch.equal(*states)
    assert all(torch.equal(*parts) for parts in zip(*(v4.blocks(cache) for cache in caches), strict=True))
