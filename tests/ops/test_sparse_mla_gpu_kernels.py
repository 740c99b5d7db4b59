"""The attention kernel at the sizes it is for: long lists, all heads, large pools, many rows, captured graphs."""

import dataclasses

import pytest
import torch

from tests.ops.attention_inputs import MODULES, poison
from tests.ops.attention_kernels import DEVICE, Inputs, agrees, back_from, check, made
from thalweg.layouts import v4
from thalweg.ops import hardware
from thalweg.ops.sparse_mla import choice, tile
from thalweg.ops.sparse_mla import triton as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("spoiled_attention")]

LAYOUTS = ["v4", "v32", "mla_bf16"]
WIDTHS = [64, 128, 133, 192, 256, 512, 1152, 2048, 2051, 8320]
HEADS = [1, 4, 8, 12, 16, 32, 64, 96, 128]


def large(
    layout: str,
    rows: int,
    heads: int,
    width: int,
    extra_width: int = 0,
    page_slots: int = 64,
    pages: int = 200,
    seed: int = 0,
) -> Inputs:
    """Inputs made on the device: lists of random slots, NaN in page 0, which no list names."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    module = MODULES[layout]
    caches = []
    for _ in range(1 + (extra_width > 0)):
        cache = module.allocate(pages, page_slots, device=DEVICE)
        poison(cache)
        slots = torch.arange(page_slots, pages * page_slots, device=DEVICE)
        module.write(cache, slots, torch.randn(len(slots), module.WIDTH, generator=g, device=DEVICE))
        caches.append(cache)
    q = torch.randn(rows, heads, module.WIDTH, generator=g, device=DEVICE).bfloat16()
    lists = [
        torch.randint(page_slots, pages * page_slots, (rows, each), generator=g, device=DEVICE).int()
        for each in (width, extra_width)
    ]
    extra = (caches[1], lists[1], None) if extra_width else None
    return Inputs(q, caches[0], lists[0], None, torch.randn(heads, generator=g, device=DEVICE), extra)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_and_batches_on_a_gpu(layout: str, heads: int) -> None:
    """Field case 10: every head count, from one row to more rows than multiprocessors, window and compressed entries."""
    for rows in (1, 4, 16, 64, 150):
        inputs = large(layout, rows, heads, 128, 512)
        check(inputs)
        inputs.lengths = torch.arange(rows, device=DEVICE) * 37 % 129
        inputs.extra = (*inputs.extra[:2], (torch.arange(rows, device=DEVICE) * 101 % 600 - 40).int())
        check(inputs)


@pytest.mark.parametrize("heads", [8, 64, 128])
def test_results_turned_back_by_positions_of_a_million_on_a_gpu(heads: int) -> None:
    """In one split and in several; the first 448 channels have the bits of results that are not turned."""
    for rows in (1, 16, 150):
        inputs = large("v4", rows, heads, 128, 512)
        positions = torch.randint(2**20, (rows,), device=DEVICE)
        inputs.rotate_back = positions, back_from()[1].to(DEVICE)
        plain = dataclasses.replace(inputs, rotate_back=None)
        for deterministic in (False, True):
            got, unturned = check(inputs, deterministic=deterministic), plain.run("triton", deterministic=deterministic)
            assert torch.equal(got[0][..., :448], unturned[0][..., :448]) and torch.equal(got[1], unturned[1])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_widths_on_a_gpu(layout: str, width: int) -> None:
    """Field case 10."""
    for rows, heads in ((1, 64), (3, 8), (40, 12)):
        inputs = large(layout, rows, heads, width)
        inputs.indices[:, 1::5] = -1
        check(inputs)
        check(inputs, deterministic=True)


@pytest.mark.parametrize("page_slots", [1, 2, 16, 61, 64, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes_on_a_gpu(layout: str, page_slots: int) -> None:
    check(made(layout, 3, 64, 500, 133, page_slots=page_slots, extra_page_slots=page_slots))
    check(made(layout, 3, 16, 500, 133, page_slots=page_slots, extra_page_slots=64))


@pytest.mark.parametrize("rows", [64, 65])
def test_verify_rows_of_window_and_draft_on_a_gpu(rows: int) -> None:
    """Field case 11: 128 window and 5 draft entries, 64 to 65 rows; seen: a change of kernel at 64 and a fault beyond."""
    inputs = large("v4", rows, 64, 133, 512)
    check(inputs)
    together = inputs.run("triton", deterministic=True)
    for row in (0, 31, 63, rows - 1):
        alone = inputs.part(slice(row, row + 1)).run("triton", deterministic=True)
        for one, every in zip(alone, together, strict=True):
            assert torch.equal(one[0], every[row])


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_the_same_bits_at_any_batch_on_a_gpu(layout: str, heads: int) -> None:
    inputs = large(layout, 300, heads, 128, 1024)
    inputs.lengths = torch.arange(300, device=DEVICE) % 129
    together = inputs.run("triton", deterministic=True)
    for begin, end in ((0, 1), (7, 8), (7, 71), (100, 101), (99, 260), (299, 300)):
        part = inputs.part(slice(begin, end)).run("triton", deterministic=True)
        for some, every in zip(part, together, strict=True):
            assert torch.equal(some, every[begin:end])


@pytest.mark.parametrize("heads", [16, 64])
def test_nan_in_slots_of_others_changes_no_bit_on_a_gpu(heads: int) -> None:
    """Masked rows come from nowhere: not from slot 0, whose codes and scales are NaN, nor from a neighbour's row."""
    inputs = large("v4", 8, heads, 200, 300)
    inputs.indices[:, ::3] = -1
    inputs.extra[1][:, 5:70] = 2**31 - 1
    want = check(inputs)
    used = torch.cat([inputs.indices[:4].flatten(), inputs.indices[:4].flatten()]).unique().long()
    others = torch.ones(inputs.cache.shape[0] * 64, dtype=torch.bool, device=DEVICE)
    others[used[used >= 0]] = False
    data, scales = v4.blocks(inputs.cache)
    page, slot = others.nonzero().flatten() // 64, others.nonzero().flatten() % 64
    data[page, slot], scales[page, slot] = 0xFF, 0xFF
    got = inputs.run("triton")
    for row in range(4):
        assert torch.equal(got[0][row], want[0][row]) and torch.equal(got[1][row], want[1][row])


def test_pages_past_two_gibibytes_give_the_bits_of_the_packed_cache_on_a_gpu() -> None:
    """Field case 8: pages 14,339 and 14,340 at 149,760 B."""
    packed = large("v4", 3, 64, 700, page_slots=256, pages=3)
    stride, first = 149_760, 14_339
    storage = torch.full(((first + 2) * stride,), 0xFF, dtype=torch.uint8, device=DEVICE)
    far = storage.as_strided((first + 2, 256, 1, 584), (stride, 584, 584, 1))
    for page in (1, 2):
        source = packed.cache.as_strided((256 * 584,), (1,), page * packed.cache.stride(0))
        storage[(first + page - 1) * stride :][: 256 * 584] = source
    want = check(packed)
    for dtype in (torch.int32, torch.int64):
        indices = packed.indices.to(dtype) + (first - 1) * 256
        got = dataclasses.replace(packed, cache=far, indices=indices).run("triton")
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_graph_takes_fewer_rows_and_other_lengths_on_a_gpu(heads: int, deterministic: bool) -> None:
    """Field case 9: capture 8 rows, replay 6 with padding, lengths from 1 to the lists' width."""
    inputs = large("v4", 8, heads, 128, 8192, pages=400)
    inputs.lengths = torch.full((8,), 128, dtype=torch.int32, device=DEVICE)
    extra_lengths = torch.full((8,), 8192, dtype=torch.int32, device=DEVICE)
    inputs.extra = (*inputs.extra[:2], extra_lengths)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return inputs.on_device("triton", deterministic=deterministic)

    step()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for window, compressed in (
        ([128] * 6, [8192] * 6),
        ([1, 5, 128, 0, 77, 128], [0, 1, 512, 0, 8191, 4000]),
        ([128, 0, 1, 64, 2, 99], [100, 0, 31, 33, 8192, 5]),
    ):
        inputs.lengths.copy_(torch.tensor([*window, 0, -1]))
        extra_lengths.copy_(torch.tensor([*compressed, 0, 0]))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        replayed = out.cpu(), lse.cpu()
        check(large("v4", 100, 16, 512))  # an eager call between takes scratch of its own
        eager = inputs.run("triton", deterministic=deterministic)
        assert torch.equal(replayed[0], eager[0]) and torch.equal(replayed[1], eager[1])
        agrees(replayed, inputs.run("reference"))
        assert (replayed[0][6:] == 0).all() and (replayed[1][6:] == -torch.inf).all()


def test_prefill_of_thousands_of_rows_on_a_gpu() -> None:
    inputs = large("v4", 4096, 64, 128, 512)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = inputs.on_device("triton")
    grown = torch.cuda.max_memory_allocated() - before - out.numel() * 2 - lse.numel() * 4
    assert grown < 2**20  # one split: no scratch
    got = out.cpu(), lse.cpu()
    for begin in (0, 2000, 4064):
        rows = slice(begin, begin + 32)
        agrees((got[0][rows], got[1][rows]), inputs.part(rows).run("reference"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    some = inputs.on_device("triton", deterministic=True)
    grown = torch.cuda.max_memory_allocated() - before - out.numel() * 2 - lse.numel() * 4
    assert grown < 2 * choice.SCRATCH_BYTES
    rows = slice(1999, 2001)
    for one, every in zip(inputs.part(rows).on_device("triton", deterministic=True), some, strict=True):
        assert torch.equal(one, every[rows])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_choice_of_kernels_runs_on_a_gpu(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 15: every configuration launches, within the card's shared memory, with and without splits and lengths."""
    inputs = large(layout, 3, 128, 128, 300)
    forced: dict[str, object] = {}
    monkeypatch.setattr(choice, "choose", lambda *args: forced["choice"])
    monkeypatch.setattr(choice, "splits_of", lambda *args: forced["splits"])
    card = hardware.of_device(DEVICE)
    for forced["choice"] in (*choice.all_choices(card, layout), *choice._DEFAULT[layout]):
        for forced["splits"] in (1, 5):
            for lengths in (None, torch.tensor([128, 0, 77], device=DEVICE)):
                check(dataclasses.replace(inputs, lengths=lengths))
                check(dataclasses.replace(inputs, sink=None, lengths=lengths))


@pytest.mark.parametrize("layout", ["v4", "v32"])
def test_codes_decoded_without_hardware_conversion_give_the_same_bits_on_a_gpu(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 14: the way of sm_80 and sm_86, on this card."""
    inputs = large(layout, 4, 16, 128, 300)
    want = check(inputs)
    known = tile.constexprs
    kernels.attend_variant.cache_clear()
    monkeypatch.setattr(tile, "constexprs", lambda layout, how: known(layout, "packed"))
    got = inputs.run("triton")
    kernels.attend_variant.cache_clear()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
