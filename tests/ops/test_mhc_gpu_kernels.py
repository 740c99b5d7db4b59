"""The hyper-connection kernels at the sizes they are for: 1 to thousands of rows, the models' widths, captured graphs."""

import pytest
import torch

from tests.ops.mhc_kernels import DEVICE, Site, check, close, made
from thalweg.ops import hardware, mhc_post, mhc_pre
from thalweg.ops.mhc import choice
from thalweg.ops.mhc import triton as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("spoiled_mhc")]

ROWS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 256, 1000, 4096]


@pytest.mark.parametrize("width", [4096, 7168])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_decode_and_prefill_on_a_gpu(rows: int, width: int) -> None:
    check(made(rows, width), iterations=20)


@pytest.mark.parametrize("width", [1, 24, 100, 1023, 1025, 4100, 8192, 8193, 20_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_odd_widths_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    for rows in (1, 5, 70, 300):
        check(made(rows, width, dtype), iterations=20)


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_float32_streams_on_a_gpu(rows: int) -> None:
    check(made(rows, 4096, torch.float32), iterations=20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_as_exact_as_float32_torch_on_a_gpu(dtype: torch.dtype) -> None:
    """The stated error: of F X relative to |F_i||X|, against float64; tf32 would give 5e-6."""
    for rows in (1, 64, 1000):
        site = made(rows, 4096, dtype)
        partial = kernels._mix(None, site.streams, site.fn)
        x, fn = site.streams.flatten(1).double(), site.fn.double()
        norms = x.norm(dim=1, keepdim=True) * fn.norm(dim=1)
        error = ((partial[:, :, :24].double().sum(0) - x @ fn.T) / norms).abs().max()
        assert error < 1e-7
        torch.testing.assert_close(partial[:, :, 24].double().sum(0), x.square().sum(1), rtol=1e-6, atol=0)


def test_every_choice_of_kernels_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 15: every configuration launches, within the card's shared memory and registers."""
    for dtype in (torch.bfloat16, torch.float32):
        for chosen in choice.all_choices(dtype.itemsize):
            monkeypatch.setattr(choice, "choose", lambda *args, chosen=chosen: chosen)
            for width in (1000, 4096, 7168, 9000):
                check(made(33, width, dtype))


def test_a_captured_graph_takes_other_rows_and_padding_on_a_gpu() -> None:
    """Field case 9: capture once, replay with other values, NaN in rows that are padding; the bits of the eager call."""
    site = made(8, 4096)
    site.fused()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = site.fused()
    for seed in (1, 2):
        other = made(8, 4096, seed=seed)
        other.streams[6:], other.y[6:] = float("nan"), float("inf")
        for name in ("y", "streams", "post", "comb", "fn", "scale", "base", "norm"):
            getattr(site, name).copy_(getattr(other, name))
        for part in results:
            part.fill_(float("nan"))
        graph.replay()
        for replayed, eager in zip(results, other.fused(), strict=True):
            assert torch.equal(replayed[:6], eager[:6]) and not replayed[:6].isnan().any()


def test_the_same_call_gives_the_same_bits_on_a_gpu() -> None:
    for rows in (1, 64, 200, 3000):
        site = made(rows, 4096)
        first = site.fused()
        for _ in range(3):
            for one, other in zip(site.fused(), first, strict=True):
                assert torch.equal(one, other)


def test_no_more_scratch_than_the_partial_products_on_a_gpu() -> None:
    site = made(4096, 4096)
    site.fused()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = site.fused()
    results_bytes = sum(part.numel() * part.element_size() for part in results)
    cores = hardware.multiprocessors(DEVICE)
    most = choice.PROGRAMS * cores * 64 * 32 * 4 + 4096 * 32 * 4
    assert torch.cuda.max_memory_allocated() - before - results_bytes <= most + 2**20


def test_streams_beyond_2_gib_on_a_gpu() -> None:
    """64-bit addresses: 70,000 rows of 4 x 4096 bf16 are 2.3 GB."""
    site = made(64, 4096)
    rows = 70_000
    repeated = [part.repeat(-(-rows // 64), *[1] * (part.dim() - 1))[:rows] for part in (site.y, site.streams)]
    weights = [part.repeat(-(-rows // 64), *[1] * (part.dim() - 1))[:rows] for part in (site.post, site.comb)]
    large = Site(*repeated, *weights, site.fn, site.scale, site.base, site.norm)
    out, _u, post, comb = large.fused()
    for begin in (0, 65_536, 69_000):
        some = slice(begin, begin + 40)
        part = large.rows(some)
        close(out[some], mhc_post(part.y, part.streams, part.post, part.comb, implementation="reference"), 5e-6)
        _, want_post, want_comb = mhc_pre(out[some], *site.mixer(), implementation="reference")
        close(post[some], want_post, 5e-6)
        close(comb[some], want_comb, 5e-6)
