"""Field case 10: any list width, head count and page size.

Seen: "not instantiated" for widths 192, 1152, 2051; kernels for 64 and 128 heads only.
"""

import numpy as np
import pytest
import torch

from tests.ops.attention_inputs import attention, filled, live_rows
from tests.ops.builders import randn, seeded
from thalweg.layouts.work import counting
from thalweg.ops import sparse_mla

# Every width, every head count and every page size at least once, both layouts' extremes among them.
COVERING = [
    (64, 1, 1, "v4"),
    (128, 4, 2, "v4"),
    (133, 8, 16, "v32"),
    (192, 12, 61, "v4"),
    (256, 16, 64, "mla_bf16"),
    (512, 32, 256, "v4"),
    (1152, 64, 2, "v4"),
    (2048, 96, 64, "v32"),
    (2051, 128, 61, "v4"),
    (8320, 12, 256, "v4"),
    (8320, 1, 16, "exact"),
    (192, 128, 1, "mla_bf16"),
]


@pytest.mark.parametrize(("width", "heads", "page_slots", "layout"), COVERING)
def test_widths_heads_and_page_sizes(width: int, heads: int, page_slots: int, layout: str) -> None:
    g = seeded(width + heads)
    cache, known = filled(g, layout, 1 + max(2, 128 // page_slots), page_slots)
    slots = torch.tensor(sorted(known))
    indices = slots[torch.randint(len(slots), (2, width), generator=g)].int()
    indices[1, ::3] = -1
    q = randn(g, 2, heads, 512 if layout in ("v4", "exact") else 576)
    sink, lengths = randn(g, heads), torch.tensor([width, width - 1])
    with counting() as work:
        out, lse = sparse_mla(q, cache, indices, lengths, sink, scale=0.05)
    for row in range(2):
        rows = live_rows(indices[row], int(lengths[row]), known)
        want_out, want_lse = attention(q[row], rows, sink, 0.05)
        np.testing.assert_allclose(out[row].double().numpy(), want_out, rtol=2e-7, atol=1e-7)
        np.testing.assert_allclose(lse[row].double().numpy(), want_lse, rtol=2e-7)
    live = width + int((indices[1, : width - 1] != -1).sum())
    assert work.entries_attended == live


def test_the_work_counts_listed_rows_of_both_caches_not_the_lists_widths() -> None:
    g = seeded(1)
    cache, known = filled(g, "v4", 3, 64)
    slots = torch.tensor(sorted(known))
    indices = torch.full((2, 8320), -1)
    indices[0, :5], indices[1, :3] = slots[:5], slots[64:67]
    extra = torch.full((2, 512), -1)
    extra[0, 100:104] = slots[:4]
    with counting() as work:
        sparse_mla(randn(g, 2, 4, 512), cache, indices, torch.tensor([5, 2]), None, (cache, extra, None), scale=1.0)
    assert work.entries_attended == 5 + 2 + 4
    assert work.rows_read == 5 + 2 + 4
