"""index_topk selects what mqa_logits and topk select, and names the slots through the page table."""

import numpy as np
import pytest
import torch

from tests.ops.builders import NAN
from tests.ops.index_inputs import IndexInputs, index_inputs
from thalweg.ops import index_topk, mqa_logits, topk


def check_rows(inputs: IndexInputs, indices: torch.Tensor, slots: torch.Tensor, k: int, page_slots: int) -> None:
    """min(k, length) distinct live entries, none left out that beats one taken, the rest -1; slots follow the table."""
    assert (indices.dtype, slots.dtype, indices.shape) == (torch.int32, torch.int32, slots.shape)
    for row in range(len(inputs.lengths)):
        length = max(int(inputs.lengths[row]), 0)
        chosen = indices[row][indices[row] != -1].tolist()
        assert len(chosen) == len(set(chosen)) == min(k, length)
        assert all(0 <= entry < length for entry in chosen)
        for entry, slot in zip(indices[row].tolist(), slots[row].tolist(), strict=True):
            assert slot == (-1 if entry == -1 else inputs.slot(row, entry, page_slots))
        if k < length:
            scores = inputs.scores(row)
            left_out = np.delete(scores, chosen)
            assert left_out.max() <= scores[chosen].min() + 1e-6 * np.abs(scores).max()


@pytest.mark.parametrize("layout", ["index_fp8", "exact"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_best_entries_of_each_row_and_their_slots(layout: str, rows: int) -> None:
    inputs = index_inputs([0, 1, 15, 16, 17, 64, 65, 300], rows_per_request=rows, layout=layout)
    indices, slots = index_topk(**inputs.arguments(), k=16)
    check_rows(inputs, indices, slots, 16, 64)


def test_equals_mqa_logits_followed_by_topk() -> None:
    inputs = index_inputs([0, 5, 70, 200, 640], seed=2)
    logits = mqa_logits(**inputs.arguments())
    want = topk(logits, inputs.lengths, 64, deterministic=True)
    indices, _ = index_topk(**inputs.arguments(), k=64, deterministic=True)
    assert torch.equal(indices.sort(dim=1).values, want.sort(dim=1).values)


def test_equal_scores_take_the_lower_index() -> None:
    inputs = index_inputs([200, 100], layout="exact")
    inputs.weights.zero_()
    indices, _ = index_topk(**inputs.arguments(), k=50, deterministic=True)
    assert indices.sort(dim=1).values.tolist() == [list(range(50))] * 2


def test_slots_may_be_for_a_cache_with_another_page_size() -> None:
    """The same page ids own 64 index keys and, say, 80 slots of a cache: slot = page x 80 + place in the page."""
    inputs = index_inputs([130, 10], seed=3)
    indices, slots = index_topk(**inputs.arguments(), k=20, page_slots=80)
    check_rows(inputs, indices, slots, 20, 80)


def test_short_contexts_beside_a_long_one() -> None:
    """Field case 5: 0 to 2,052 tokens (0 to 513 entries) mixed with a 100K row, k = 512."""
    tokens = [0, 1, 3, 4, 5, 127, 128, 129, 2044, 2048, 2052, 100_000]
    inputs = index_inputs([n // 4 for n in tokens], seed=4, heads=2)
    assert inputs.lengths[:11].tolist() == [0, 0, 0, 1, 1, 31, 32, 32, 511, 512, 513]
    indices, slots = index_topk(**inputs.arguments(), k=512)
    check_rows(inputs, indices, slots, 512, 64)
    assert (indices != -1).sum(dim=1).tolist() == [0, 0, 0, 1, 1, 31, 32, 32, 511, 512, 512, 512]


@pytest.mark.parametrize("rows_per_request", [1, 2, 4])
@pytest.mark.parametrize("batch", [8, 32, 33, 64, 250, 256])
def test_all_lengths_zero_give_minus_one_everywhere(batch: int, rows_per_request: int) -> None:
    """Field case 2: every index -1; the page table holds ids that are in no pool, and nobody looks."""
    inputs = index_inputs([0] * batch * rows_per_request, rows_per_request=rows_per_request, heads=1)
    inputs.page_table.fill_(2**31 - 1)
    indices, slots = index_topk(**inputs.arguments(), k=512)
    assert (indices == -1).all() and (slots == -1).all()


def test_entries_past_a_length_are_never_read() -> None:
    """The last page's rest and all pages past it hold NaN or lie in no pool (index_inputs makes them so)."""
    inputs = index_inputs([65, 1], layout="exact")
    indices, _ = index_topk(**inputs.arguments(), k=80)
    assert sorted(indices[0].tolist()) == [-1] * 15 + list(range(65))
    inputs.page_table[:, 2:] = -7
    inputs.page_table[1, 1:] = -7
    again, _ = index_topk(**inputs.arguments(), k=80)
    assert torch.equal(again, indices)


@pytest.mark.parametrize("layout", ["index_fp8", "exact"])
def test_a_row_alone_equals_the_row_in_a_batch_with_nan_in_the_others(layout: str) -> None:
    inputs = index_inputs([300, 200, 150, 90], layout=layout, seed=5)
    together = index_topk(**inputs.arguments(), k=64, deterministic=True)
    for row in (1, 3):
        alone = index_topk(
            inputs.q[row : row + 1], inputs.cache, inputs.weights[row : row + 1], inputs.lengths[row : row + 1],
            inputs.page_table[row : row + 1], 64, deterministic=True,
        )  # fmt: skip
        assert torch.equal(alone[0][0], together[0][row]) and torch.equal(alone[1][0], together[1][row])
    inputs.cache[inputs.page_table[0, :5].long()] = NAN if layout == "exact" else 0xFF
    inputs.weights[2] = NAN
    poisoned = index_topk(**inputs.arguments(), k=64, deterministic=True)
    for row in (1, 3):
        assert torch.equal(poisoned[0][row], together[0][row]) and torch.equal(poisoned[1][row], together[1][row])
    for row in (0, 2):  # NaN in a row's own scores: still 64 distinct live entries
        assert poisoned[0][row].unique().numel() == 64 and int(poisoned[0][row].min()) >= 0
