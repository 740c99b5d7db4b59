"""Norm, rope and store at the sizes they are for: the models' heads, thousands of rows, pools beyond 2 GiB, captured graphs."""

import pytest
import torch

from tests.ops.attention_kernels import DEVICE
from tests.ops.builders import frequencies, randn, seeded
from tests.ops.store_kernels import LAYOUTS, blocks, check_index_query, check_query, check_store
from thalweg.layouts import v4
from thalweg.ops import norm_rope_q, norm_rope_store

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("spoiled_norm_rope")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 7, 64, 333, 5000])
def test_bytes_of_every_layout_on_a_gpu(layout: str, rows: int) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        check_store(layout, rows=rows, dtype=dtype, page_slots=64)


def test_a_million_rows_of_bytes_on_a_gpu() -> None:
    """Rounding beside ties, in numbers: no e4m3 code and no scale may differ."""
    g = torch.Generator(DEVICE).manual_seed(1)
    f = frequencies().to(DEVICE)
    for _ in range(16):
        kv = torch.randn(65_536, 512, generator=g, device=DEVICE)
        weight = torch.randn(512, generator=g, device=DEVICE)
        slots = torch.arange(256, 256 + 65_536, device=DEVICE)
        caches = [v4.allocate(257, 256, DEVICE) for _ in range(2)]
        for cache, implementation in zip(caches, ("triton", "reference"), strict=True):
            norm_rope_store(kv, weight, f, slots % 5000, cache, slots, implementation=implementation)
        (data, scales), (want, want_scales) = (v4.blocks(cache) for cache in caches)
        assert torch.equal(scales, want_scales)
        assert torch.equal(data[..., :448], want[..., :448])
        assert (data != want).sum() < 1000  # rope channels, where cosines differ in their last bit


@pytest.mark.parametrize("heads", [1, 7, 64, 128])
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_queries_on_a_gpu(rows: int, heads: int) -> None:
    for width in (128, 512, 576):
        check_query(rows, heads, width, torch.bfloat16)
    check_query(rows, heads, 512, torch.float32)
    for hadamard in (False, True):
        check_index_query(rows, heads, torch.bfloat16, hadamard, True)
        check_index_query(rows, heads, torch.float32, hadamard, False)


def test_a_slot_beyond_2_gib_on_a_gpu() -> None:
    """Field case 8: 64-bit addresses."""
    cache = v4.allocate(15_000, 256, DEVICE)
    near = v4.allocate(2, 256, DEVICE)
    kv, weight = randn(seeded(1), 2, 512).to(DEVICE), torch.ones(512, device=DEVICE)
    positions, f = torch.tensor([3, 5], device=DEVICE), frequencies().to(DEVICE)
    slots = torch.tensor([14_990 * 256 + 7, 14_999 * 256 + 255], device=DEVICE)
    norm_rope_store(kv, weight, f, positions, cache, slots.int(), implementation="triton")
    norm_rope_store(kv, weight, f, positions, near, torch.tensor([263, 511], device=DEVICE), implementation="triton")
    for far, close in zip(v4.blocks(cache), v4.blocks(near), strict=True):
        assert torch.equal(far[14_990, 7], close[1, 7]) and torch.equal(far[14_999, 255], close[1, 255])
        assert int(far[1:14_990].count_nonzero()) == 0


def test_captured_graphs_take_other_rows_on_a_gpu() -> None:
    """Field case 9: capture 8 rows, replay with other values and with padding."""
    f, weight = frequencies().to(DEVICE), torch.ones(512, device=DEVICE)
    kv = torch.randn(8, 512, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(8, 64, 512, device=DEVICE, dtype=torch.bfloat16)
    positions, slots = torch.arange(8, device=DEVICE), torch.arange(64, 72, device=DEVICE)
    cache, other = v4.allocate(4, 64, DEVICE), v4.allocate(4, 64, DEVICE)

    def step(into: torch.Tensor) -> torch.Tensor:
        norm_rope_store(kv, weight, f, positions, into, slots, implementation="triton")
        return norm_rope_q(q, f, positions, implementation="triton")

    step(other)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(cache)
    for last in (8, 5):
        kv.normal_()
        q.normal_()
        positions.add_(1000)
        slots.copy_(torch.tensor([*range(100, 100 + last), *[-1] * (8 - last)]))
        cache.zero_()
        other.zero_()
        graph.replay()
        assert torch.equal(out, step(other))
        assert all(torch.equal(a, b) for a, b in zip(blocks(cache), blocks(other), strict=True))
