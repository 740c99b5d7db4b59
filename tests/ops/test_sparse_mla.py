"""sparse_mla against the softmax of the design in float64: lists, lengths, sinks, one and two caches."""

import math

import numpy as np
import pytest
import torch

from tests.ops.attention_inputs import attention, filled, live_rows, poison
from tests.ops.builders import NAN, randn, seeded
from thalweg.ops import sparse_mla

SCALE = 512**-0.5


def check(out: torch.Tensor, lse: torch.Tensor, want: tuple[np.ndarray, np.ndarray]) -> None:
    """One rounding of the output dtype, one float32 rounding of the log-sum-exp."""
    step = {torch.float32: 2e-7, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}[out.dtype]
    np.testing.assert_allclose(out.double().numpy(), want[0], rtol=step, atol=1e-7)
    np.testing.assert_allclose(lse.double().numpy(), want[1], rtol=2e-7, atol=1e-7)


def pick(generator: torch.Generator, known: dict, rows: int, width: int) -> torch.Tensor:
    slots = torch.tensor(sorted(known))
    return slots[torch.randint(len(slots), (rows, width), generator=generator)].int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["v4", "exact", "v32", "mla_bf16"])
def test_one_cache_with_a_sink(layout: str, dtype: torch.dtype) -> None:
    g = seeded(1)
    cache, known = filled(g, layout, 4, 16)
    q = (randn(g, 3, 4, cache.shape[3] if layout == "exact" else 512 if layout == "v4" else 576) * 2).to(dtype)
    indices, sink = pick(g, known, 3, 20), randn(g, 4)
    out, lse = sparse_mla(q, cache, indices, sink=sink, scale=SCALE)
    assert (out.dtype, out.shape, lse.dtype, lse.shape) == (dtype, (3, 4, 512), torch.float32, (3, 4))
    for row in range(3):
        check(out[row], lse[row], attention(q[row], live_rows(indices[row], None, known), sink, SCALE))


@pytest.mark.parametrize("layout", ["v4", "exact"])
def test_two_caches_are_one_softmax_with_one_sink(layout: str) -> None:
    """Window pages of 256 slots and compressed pages of 64, each with its own list and length."""
    g = seeded(2)
    window, known = filled(g, layout, 3, 256)
    extra, known_extra = filled(g, layout, 4, 64)
    q, sink = randn(g, 5, 4, 512) * 2, randn(g, 4)
    indices, extra_indices = pick(g, known, 5, 30), pick(g, known_extra, 5, 20)
    lengths, extra_lengths = torch.tensor([30, 0, 7, 0, -2]), torch.tensor([20, 5, 0, 0, 1])
    out, lse = sparse_mla(q, window, indices, lengths, sink, (extra, extra_indices, extra_lengths), scale=SCALE)
    for row in range(5):
        rows = live_rows(indices[row], int(lengths[row]), known)
        rows += live_rows(extra_indices[row], int(extra_lengths[row]), known_extra)
        check(out[row], lse[row], attention(q[row], rows, sink, SCALE))


def test_minus_one_may_stand_anywhere_and_nothing_past_a_length_is_read() -> None:
    g = seeded(3)
    cache, known = filled(g, "v4", 3, 64)
    q, indices = randn(g, 4, 2, 512), pick(g, known, 4, 40)
    indices[torch.rand(4, 40, generator=g) < 0.4] = -1
    lengths = torch.tensor([40, 39, 11, 1], dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        indices[row, length:] = torch.tensor([0, 2**31 - 1, -5, 63])[torch.arange(40 - length) % 4].int()
    out, lse = sparse_mla(q, cache, indices, lengths, scale=SCALE)
    for row in range(4):
        check(out[row], lse[row], attention(q[row], live_rows(indices[row], int(lengths[row]), known), None, SCALE))


def test_a_masked_first_chunk_equals_the_list_without_it() -> None:
    """Field case 6: width 64, the first 16 indices -1, 48 valid: NaN for good (a running maximum of -inf minus itself)."""
    g = seeded(4)
    cache, known = filled(g, "v4", 3, 64)
    q, tail, sink = randn(g, 2, 4, 512), pick(g, known, 2, 48), randn(g, 4)
    masked = torch.cat((torch.full((2, 16), -1, dtype=torch.int32), tail), dim=1)
    got = sparse_mla(q, cache, masked, sink=sink, scale=SCALE)
    want = sparse_mla(q, cache, tail, sink=sink, scale=SCALE)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[0].isfinite().all() and got[1].isfinite().all()


@pytest.mark.parametrize("sink", [None, 3.0, -math.inf, math.inf])
@pytest.mark.parametrize("two", [False, True])
def test_nothing_to_attend_gives_zero_and_minus_infinity(sink: float | None, two: bool) -> None:
    """Field case 7: all -1, or length 0; slot 0 of the cache full of NaN codes and scales."""
    g = seeded(5)
    cache, _ = filled(g, "v4", 2, 64)
    poison(cache)
    q = randn(g, 4, 2, 512)
    indices = torch.zeros(4, 8, dtype=torch.int32)  # slot 0
    indices[:2] = -1
    lengths = torch.tensor([8, 0, 0, -1])
    extra = (cache, indices, lengths) if two else None
    sinks = None if sink is None else torch.full((2,), sink)
    out, lse = sparse_mla(q, cache, indices, lengths, sinks, extra, scale=SCALE)
    assert torch.equal(out, torch.zeros(4, 2, 512)) and (lse == -math.inf).all()
    out, lse = sparse_mla(q[:2], cache, torch.empty(2, 0, dtype=torch.int32), None, sinks, scale=SCALE)
    assert torch.equal(out, torch.zeros(2, 2, 512)) and (lse == -math.inf).all()


def test_a_sink_of_minus_infinity_is_no_sink_and_the_lse_never_holds_it() -> None:
    g = seeded(6)
    cache, known = filled(g, "v4", 3, 64)
    q, indices = randn(g, 2, 3, 512), pick(g, known, 2, 33)
    without = sparse_mla(q, cache, indices, scale=SCALE)
    silent = sparse_mla(q, cache, indices, sink=torch.full((3,), -math.inf), scale=SCALE)
    strong = sparse_mla(q, cache, indices, sink=torch.full((3,), 50.0), scale=SCALE)
    assert torch.equal(without[0], silent[0])
    assert torch.equal(without[1], silent[1]) and torch.equal(without[1], strong[1])
    assert strong[0].abs().max() < 1e-15


def test_splits_merged_by_their_lse_with_the_sink_once_equal_the_whole() -> None:
    """Field case 7: the sink once, also after merging splits: out = sum_i e^{lse_i} o_i / (sum_i e^{lse_i} + e^sink)."""
    g = seeded(7)
    cache, known = filled(g, "v4", 3, 64)
    q, indices, sink = randn(g, 1, 3, 512), pick(g, known, 1, 90), randn(g, 3)
    whole, lse = sparse_mla(q, cache, indices, sink=sink, scale=SCALE)
    parts = [sparse_mla(q, cache, part, scale=SCALE) for part in (indices[:, :7], indices[:, 7:64], indices[:, 64:])]
    weights = torch.stack([part_lse for _, part_lse in parts]).double().exp()
    total = (weights.sum(dim=0) + sink.double().exp()).unsqueeze(-1)
    merged = sum(w.unsqueeze(-1) * part.double() for w, (part, _) in zip(weights, parts, strict=True)) / total
    torch.testing.assert_close(whole.double(), merged, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(lse.double(), weights.sum(dim=0).log(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [300.0, -300.0])
def test_large_scores_neither_overflow_nor_vanish(size: float) -> None:
    g = seeded(8)
    cache, known = filled(g, "exact", 2, 16)
    direction = torch.from_numpy(known[16]).float()
    q = (direction * size).view(1, 1, 512)
    indices = torch.full((1, 3), 16)
    out, lse = sparse_mla(q, cache, indices, sink=torch.zeros(1), scale=SCALE)
    want = attention(q[0], live_rows(indices[0], None, known), None, SCALE)
    assert abs(want[1][0]) > 5000
    np.testing.assert_allclose(lse[0].double().numpy(), want[1], rtol=1e-6)
    assert out.isfinite().all()


def test_a_row_alone_equals_the_row_in_a_batch_with_nan_in_the_others() -> None:
    g = seeded(9)
    cache, known = filled(g, "v4", 5, 64)
    q, sink = randn(g, 9, 4, 512), randn(g, 4)
    indices = pick(g, {slot: known[slot] for slot in known if slot < 128}, 9, 70)
    indices[::2] += 128  # the even rows attend to pages of their own
    lengths = torch.tensor([70, 70, 3, 41, 0, 64, 70, 1, 70])
    together = sparse_mla(q, cache, indices, lengths, sink, scale=SCALE)
    poison(cache[3:])
    q[::2] = NAN
    poisoned = sparse_mla(q, cache, indices, lengths, sink, scale=SCALE)
    for row in range(1, 9, 2):
        one = slice(row, row + 1)
        alone = sparse_mla(q[one], cache, indices[one], lengths[one], sink, scale=SCALE)
        for result in (0, 1):
            assert torch.equal(poisoned[result][row], together[result][row])
            assert torch.equal(alone[result][0], together[result][row])
            assert not together[result][row].isnan().any()
