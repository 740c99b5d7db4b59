"""Exact selection: the multiset of scores, ties by the lower index, whatever lies past a length."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.builders import NAN, randn, seeded
from thalweg.ops import topk

# A few values only, so that ties are the rule; both zeros, infinities and neighbours one bit apart.
VALUES = [0.0, -0.0, 1.0, 1.0000001192092896, -1.0, math.inf, -math.inf, 1e-45, 3e38]


def by_sorting(scores: list[float], k: int) -> list[int]:
    """The k best, highest first, equal scores (0.0 and -0.0 are equal) by the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.sampled_from(VALUES), min_size=12, max_size=12), min_size=1, max_size=4),
    st.integers(1, 15),
    st.data(),
)
def test_selection_equals_a_sort(rows: list[list[float]], k: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(-1, 12), min_size=len(rows), max_size=len(rows)))
    logits = torch.tensor(rows, dtype=torch.float32)
    for row, length in enumerate(lengths):
        logits[row, max(length, 0) :] = data.draw(st.sampled_from([NAN, math.inf]))
    counts = torch.tensor(lengths)
    ordered = topk(logits, counts, k, ordered=True, deterministic=True)
    unordered = topk(logits, counts, k, deterministic=True)
    assert ordered.dtype == torch.int32 and ordered.shape == (len(rows), k)
    for row, length in enumerate(lengths):
        live = logits[row, : max(length, 0)].tolist()
        want = by_sorting(live, k)
        assert ordered[row].tolist() == want + [-1] * (k - len(want))
        assert sorted(unordered[row].tolist()) == sorted(ordered[row].tolist())


def scored(ones: int, length: int, seed: int) -> torch.Tensor:
    logits = torch.zeros(1, length)
    logits[0, torch.randperm(length, generator=seeded(seed))[:ones]] = 1.0
    return logits


def test_a_hundred_ones_among_8220_zeros_fill_2048_places() -> None:
    """Field case 3: L = 8320, k = 2048; 924 slots were left -1, then an illegal access downstream."""
    logits = scored(100, 8320, 1)
    chosen = topk(logits, torch.tensor([8320]), 2048)[0]
    assert chosen.unique().numel() == 2048 and int(chosen.min()) >= 0 and int(chosen.max()) < 8320
    assert int(logits[0, chosen.long()].sum()) == 100
    deterministic = topk(logits, torch.tensor([8320]), 2048, deterministic=True)[0]
    assert sorted(deterministic.tolist()) == sorted(by_sorting(logits[0].tolist(), 2048))


@pytest.mark.parametrize("value", [0.0, -3.5, math.inf, -math.inf])
def test_all_equal_scores_give_the_lowest_indices(value: float) -> None:
    """Field case 3: all equal."""
    chosen = topk(torch.full((1, 8320), value), torch.tensor([8320]), 2048, deterministic=True)[0]
    assert sorted(chosen.tolist()) == list(range(2048))


def test_rows_with_infinity_rank_it_first_and_stay_complete() -> None:
    """Field case 3: rows with +inf; and visible entries of score -inf still fill the places that are there."""
    logits = randn(seeded(2), 3, 8320)
    logits[0, ::100] = math.inf
    logits[1] = -math.inf
    logits[1, 7] = 0.0
    logits[2, :4000] = math.inf
    chosen = topk(logits, torch.tensor([8320, 1000, 8320]), 2048, ordered=True, deterministic=True)
    for row, length in enumerate([8320, 1000, 8320]):
        want = by_sorting(logits[row, :length].tolist(), 2048)
        assert chosen[row].tolist() == want + [-1] * (2048 - len(want))


def test_a_score_that_is_nan_costs_no_place() -> None:
    """Never too few, never one twice, even then."""
    logits = randn(seeded(3), 1, 100)
    logits[0, 10:20] = NAN
    chosen = topk(logits, torch.tensor([50]), 32)[0]
    assert chosen.unique().numel() == 32 and int(chosen.min()) >= 0 and int(chosen.max()) < 50
    everything = topk(logits, torch.tensor([50]), 64)[0]
    assert sorted(everything.tolist()) == [-1] * 14 + list(range(50))


@pytest.mark.parametrize("rows_per_request", [1, 2, 4])
@pytest.mark.parametrize("batch", [8, 32, 33, 64, 250, 256])
def test_all_lengths_zero_give_minus_one_everywhere(batch: int, rows_per_request: int) -> None:
    """Field case 2: schedule metadata out of bounds at B % 32 == 0."""
    rows = batch * rows_per_request
    logits = torch.full((rows, 128), NAN)
    assert (topk(logits, torch.zeros(rows, dtype=torch.int32), 16) == -1).all()
    assert (topk(logits, torch.full((rows,), -4), 16) == -1).all()


def test_a_row_alone_equals_the_row_in_a_batch_with_nan_in_the_others() -> None:
    logits = torch.randint(0, 5, (9, 300), generator=seeded(4)).float()
    lengths = torch.tensor([300, 299, 0, 17, 300, 64, 5, 300, 1])
    together = topk(logits, lengths, 20, deterministic=True)
    poisoned = logits.clone()
    poisoned[::2] = NAN
    among_nan = topk(poisoned, lengths, 20, deterministic=True)
    for row in range(1, 9, 2):
        alone = topk(logits[row : row + 1], lengths[row : row + 1], 20, deterministic=True)
        assert torch.equal(alone[0], together[row]) and torch.equal(among_nan[row], together[row])


def test_logits_may_be_a_view_wider_than_any_row_and_lengths_int64() -> None:
    buffer = torch.full((4, 1000), NAN)
    view = buffer[:, 100:400]
    view.copy_(randn(seeded(5), 4, 300))
    lengths = torch.tensor([300, 1, 0, 150])
    assert torch.equal(topk(view, lengths, 30), topk(view.contiguous(), lengths.int(), 30))
    assert topk(torch.empty(0, 10), torch.empty(0).int(), 3).shape == (0, 3)
    assert topk(torch.empty(2, 0), torch.zeros(2).int(), 3).tolist() == [[-1] * 3] * 2
