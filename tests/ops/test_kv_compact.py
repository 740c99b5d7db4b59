"""kv_compact moves bytes, as if all were read before any was written, and touches nothing else."""

import pytest
import torch

from tests.ops.builders import seeded
from thalweg.layouts import exact, index_fp8, mla_bf16, v4, v32
from thalweg.ops import kv_compact


def random_bytes(cache: torch.Tensor, seed: int) -> torch.Tensor:
    """Fills a cache's whole storage with random bytes, NaN codes included."""
    storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    storage.copy_(torch.randint(0, 256, storage.shape, generator=seeded(seed), dtype=torch.uint8))
    return storage


def caches(page_slots: int) -> dict[str, torch.Tensor]:
    packed = {
        "v4": v4.allocate(4, page_slots),
        "index_fp8": index_fp8.allocate(4, page_slots),
        "v32": v32.allocate(4, page_slots),
        "mla_bf16": mla_bf16.allocate(4, page_slots),
        "exact": exact.allocate(4, page_slots, 33),
    }
    gaps = v4.allocate(8, page_slots)
    packed["v4 with gaps"] = gaps[::2]
    return packed


def slot_bytes(layout: str, page_slots: int, stride: int, slot: int) -> list[range]:
    """The byte ranges of a slot, from the design's table, in a storage whose pages are `stride` bytes apart."""
    page, place = slot // page_slots * stride, slot % page_slots
    inline = {"v32": 656, "mla_bf16": 1152, "exact": 132}
    if layout in inline:
        return [range(page + place * inline[layout], page + (place + 1) * inline[layout])]
    data, scale = (128, 4) if layout == "index_fp8" else (576, 8)
    scales = page + page_slots * data
    return [
        range(page + place * data, page + (place + 1) * data),
        range(scales + place * scale, scales + (place + 1) * scale),
    ]


@pytest.mark.parametrize("page_slots", [1, 2, 16, 61, 64])
@pytest.mark.parametrize("layout", ["v4", "v4 with gaps", "index_fp8", "v32", "mla_bf16", "exact"])
def test_the_bytes_of_slots_move_and_all_others_stay(layout: str, page_slots: int) -> None:
    """A chain 5 -> 6 -> 7 (in a page of 16), a swap over a page boundary, a move onto itself, -1 on either side."""
    cache = caches(page_slots)[layout]
    storage = random_bytes(cache, page_slots)
    last = 4 * page_slots - 1
    if page_slots == 1:
        sources, targets = [1, 2, -1, 3], [2, 3, 0, 1]
    else:
        sources = [page_slots + i for i in (0, 1)] + [last, page_slots - 1, 2 * page_slots, -1, 0]
        targets = [page_slots + i for i in (1, 0)] + [page_slots - 1, last, 2 * page_slots, 1, -1]
    expected = storage.clone()
    stride = cache.stride(0) * cache.element_size()
    for source, target in zip(sources, targets, strict=True):
        if source >= 0 and target >= 0:
            pairs = zip(
                slot_bytes(layout, page_slots, stride, source),
                slot_bytes(layout, page_slots, stride, target),
                strict=True,
            )
            for a, b in pairs:
                expected[b.start : b.stop] = storage[a.start : a.stop]
    kv_compact([cache], torch.tensor(sources), torch.tensor(targets))
    assert torch.equal(storage, expected)


def test_overlapping_chains_read_before_they_write() -> None:
    """Accepted branches slide down by one or more: every target is the source of the next."""
    cache = exact.allocate(4, 8, 4)
    cache.view(32, 4).copy_(torch.arange(32).view(32, 1).expand(32, 4))
    sources = torch.arange(10, 30, dtype=torch.int32)
    kv_compact([cache], sources, sources - 1)
    assert cache.view(32, 4)[:, 0].tolist() == [*range(9), *range(10, 30), 29, 30, 31]
    kv_compact([cache], torch.arange(9, 28), torch.arange(10, 29))
    assert cache.view(32, 4)[:, 0].tolist() == [*range(9), 10, *range(10, 29), 29, 30, 31]


def test_all_layers_of_a_list_move_alike() -> None:
    layers = [v4.allocate(3, 4) for _ in range(3)]
    before = [random_bytes(layer, seed).clone() for seed, layer in enumerate(layers)]
    kv_compact(layers, torch.tensor([5]), torch.tensor([10]))
    for layer, old in zip(layers, before, strict=True):
        unchanged = v4.allocate(3, 4)
        torch.empty(0, dtype=torch.uint8).set_(unchanged.untyped_storage()).copy_(old)
        for block, old_block in zip(v4.blocks(layer), v4.blocks(unchanged), strict=True):
            assert torch.equal(block[2, 2], old_block[1, 1])


def test_no_moves_change_nothing() -> None:
    cache = v4.allocate(2, 4)
    storage = random_bytes(cache, 1)
    before = storage.clone()
    kv_compact([cache], torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    kv_compact([cache], torch.tensor([-1, 3]), torch.tensor([2, -1]))
    assert torch.equal(storage, before)


def test_layouts_that_share_slots_move_in_one_call() -> None:
    """c4 entries and their index keys lie at the same slots of pages of one size."""
    entries, keys = v4.allocate(3, 64), index_fp8.allocate(3)
    row, key = torch.randn(1, 512, generator=seeded(1)), torch.randn(1, 128, generator=seeded(2))
    v4.write(entries, torch.tensor([70]), row)
    index_fp8.write(keys, torch.tensor([70]), key)
    kv_compact([entries, keys], torch.tensor([70]), torch.tensor([66]))
    both = torch.tensor([66, 70])
    for layout, cache in ((v4, entries), (index_fp8, keys)):
        moved, source = layout.read(cache, both)
        assert torch.equal(moved, source) and bool(source.any())


def test_caches_of_different_page_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="one page size and page count"):
        kv_compact([v4.allocate(3, 64), v4.allocate(4, 64)], torch.tensor([64]), torch.tensor([65]))


def test_a_target_named_twice_is_an_error_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(IndexError, match="named twice"):
        kv_compact([v4.allocate(3, 64)], torch.tensor([64, 65]), torch.tensor([66, 66]))
