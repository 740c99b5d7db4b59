"""Field case 8: pages far apart, past 2 GiB, with poison between them. Bits equal to the packed cache; gaps stay.

The buffers are as large as the addresses need and almost all of it is never touched: memory of the pages in use only.
"""

import pytest
import torch

from tests.ops.builders import NAN, frequencies, randn, seeded
from thalweg.layouts import index_fp8, v4
from thalweg.ops import CompressPlan, compress, index_topk, kv_compact, mqa_logits, norm_rope_store, sparse_mla

INDEX_STRIDE, INDEX_PAGES = 1_002_240, [1, 2142, 2143, 2200]  # 2,143 pages at this stride end past 2^31 bytes
MAIN_STRIDE, MAIN_PAGES = 149_760, [14_339, 14_340]  # 14,340 x 149,760 > 2^31


class Strided:
    """A cache whose pages lie `stride` bytes apart; the pages in use and what lies around them hold `poison`."""

    def __init__(self, pages: list[int], page_slots: int, width: int, stride: int, poison: int = 0xFF) -> None:
        count, self.page_bytes, self.poison = max(pages) + 1, page_slots * width, poison
        self.storage = torch.empty(count * stride, dtype=torch.uint8)  # committed where it is written to
        self.cache = self.storage.as_strided((count, page_slots, 1, width), (stride, width, width, 1))
        margin = min(5000, stride - self.page_bytes)
        self.regions = []
        for page in pages:
            start = max(0, page * stride - margin)
            stop = min(self.storage.shape[0], page * stride + self.page_bytes + margin)
            self.storage[start:stop] = poison
            self.regions.append((start, stop, page * stride))

    def gaps_hold_poison(self) -> bool:
        return all(
            bool((self.storage[start:page] == self.poison).all())
            and bool((self.storage[page + self.page_bytes : stop] == self.poison).all())
            for start, stop, page in self.regions
        )


def test_the_sizes_reach_past_two_gibibytes() -> None:
    assert INDEX_PAGES[2] * INDEX_STRIDE + 8448 > 2**31 > INDEX_PAGES[1] * INDEX_STRIDE
    assert MAIN_PAGES[1] * MAIN_STRIDE > 2**31 > MAIN_PAGES[0] * MAIN_STRIDE


def test_index_scores_and_selection_equal_the_packed_cache() -> None:
    """Seen: one layer of many in a page of 1,002,240 B; ids 1, 2142, 2143, 2200; 32-bit offsets wrap."""
    g = seeded(1)
    far, packed = Strided(INDEX_PAGES, 64, 132, INDEX_STRIDE), index_fp8.allocate(5)
    keys, entries = randn(g, 250, 128), torch.arange(250)
    tables = {id(far): torch.tensor([INDEX_PAGES]).int(), id(packed): torch.tensor([[1, 2, 3, 4]]).int()}
    q, weights = (randn(g, 3, 16, 128) * 40).to(torch.float8_e4m3fn), randn(g, 3, 16)
    lengths, owner = torch.tensor([250, 129, 64]), torch.zeros(3, dtype=torch.int32)
    results = []
    for cache, table in ((far.cache, tables[id(far)]), (packed, tables[id(packed)])):
        index_fp8.write(cache, table[0, entries // 64].long() * 64 + entries % 64, keys)
        logits = mqa_logits(q, cache, weights, lengths, table, owner, torch.full((3, 256), NAN), clean=True)
        indices, slots = index_topk(q, cache, weights, lengths, table, 100, owner, deterministic=True)
        pages = torch.where(slots >= 0, slots // 64, -1)
        results.append((logits, indices, torch.where(slots >= 0, slots % 64, -1), pages))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1]) and torch.equal(results[0][2], results[1][2])
    renamed = torch.tensor([0, *INDEX_PAGES])[results[1][3].clamp(min=0)]
    assert torch.equal(results[0][3], torch.where(results[1][3] >= 0, renamed, -1).int())
    assert far.gaps_hold_poison()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_a_main_cache_past_two_gibibytes_is_stored_to_read_and_moved(slot_dtype: torch.dtype) -> None:
    """Pages 14,339 and 14,340 at 149,760 B; the store, attention and compaction give the bits of the packed cache."""
    g = seeded(2)
    kv, weight, q = randn(g, 300, 512), randn(g, 512), randn(g, 2, 3, 512)
    positions, place = torch.arange(300), torch.randperm(512, generator=g)[:300]
    indices = place[torch.randint(300, (2, 128), generator=g)]
    results = []
    far = Strided(MAIN_PAGES, 256, 584, MAIN_STRIDE)
    for cache, first in ((far.cache, MAIN_PAGES[0] * 256), (v4.allocate(4, 256), 256)):
        slots = (first + place).to(slot_dtype)
        norm_rope_store(kv, weight, frequencies(), positions, cache, slots)
        before = sparse_mla(q, cache, (first + indices).to(slot_dtype), scale=512**-0.5)
        kv_compact([cache], slots[:100], slots[100:200])
        after = sparse_mla(q, cache, (first + indices).to(slot_dtype), scale=512**-0.5)
        results.append([*before, *after, v4.read(cache, slots)])
    for strided, packed in zip(*results, strict=True):
        assert torch.equal(strided, packed) and not packed.isnan().any()
    assert far.gaps_hold_poison()


def test_compressed_entries_go_past_two_gibibytes_too() -> None:
    g = seeded(3)
    far, packed = Strided(MAIN_PAGES, 64, 584, MAIN_STRIDE), v4.allocate(3, 64)
    kv, gate, ape, weight = randn(g, 516, 1024), randn(g, 516, 1024), randn(g, 4, 1024), randn(g, 512)
    positions = torch.arange(516)
    completes = positions % 4 == 3
    rows = []
    for cache, first in ((far.cache, MAIN_PAGES[0] * 64 - 1), (packed, 63)):
        slots = torch.where(completes & (positions > 3), first + positions // 4, -1)
        plan = CompressPlan(positions, torch.zeros(516, dtype=torch.int64), slots)
        state = torch.full((1, 8, 2, 1024), NAN)
        compress(kv, gate, state, ape, plan, weight, frequencies(), cache, ratio=4)
        rows.append(v4.read(cache, slots[slots >= 0]))
    assert torch.equal(*rows) and far.gaps_hold_poison()


def test_views_with_gaps_between_pages_serve_every_operation_alike() -> None:
    """One layer of a pool that interleaves layers: page stride three times the page, offset by one layer."""
    g = seeded(4)
    layers = torch.full((4, 3, 37_440), 0xFF, dtype=torch.uint8)
    view = layers[:, 1].as_strided((4, 64, 1, 584), (3 * 37_440, 584, 584, 1), 37_440)
    packed = v4.allocate(4, 64)
    rows, q = randn(g, 128, 512), randn(g, 2, 4, 512)
    slots = torch.randperm(192, generator=g)[:128] + 64
    indices = slots[torch.randint(128, (2, 64), generator=g)]
    for cache in (view, packed):
        v4.write(cache, slots, rows)
    got = sparse_mla(q, view, indices, scale=0.05)
    want = sparse_mla(q, packed, indices, scale=0.05)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert (layers[:, [0, 2]] == 0xFF).all() and (layers[:, 1, 64 * 584 :] == 0xFF).all()
