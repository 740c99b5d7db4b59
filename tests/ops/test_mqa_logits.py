"""Indexer scores against sum_h w_h relu(q_h . k) in float64, live columns only."""

import numpy as np
import pytest
import torch

from tests.layouts.number_formats import E4M3
from tests.ops.builders import NAN, randn, seeded, wide
from tests.ops.index_inputs import index_inputs
from thalweg.layouts.work import counting
from thalweg.ops import mqa_logits, mqa_logits_ragged

LENGTHS = [0, 1, 63, 64, 65, 200, -3, 129]


def check(logits: torch.Tensor, want: np.ndarray) -> None:
    """Relative to the row's largest magnitude: 1e-5 is the contract; a float64 reference is at one float32 rounding."""
    if len(want):
        assert np.abs(wide(logits)[: len(want)] - want).max() <= 1e-7 * np.abs(want).max()


@pytest.mark.parametrize("layout", ["index_fp8", "exact"])
@pytest.mark.parametrize("page_keys", [1, 16, 61, 64])
def test_scores_equal_the_formula_and_other_columns_stay(layout: str, page_keys: int) -> None:
    inputs = index_inputs(LENGTHS, layout=layout, page_keys=page_keys)
    width = page_keys * inputs.page_table.shape[1]
    out = torch.full((len(LENGTHS), width + 5), 123.0)
    result = mqa_logits(**inputs.arguments(), out=out)
    assert result is out
    for row, length in enumerate(LENGTHS):
        check(out[row], inputs.scores(row))
        assert (out[row, max(length, 0) :] == 123.0).all()


@pytest.mark.parametrize("rows", [2, 4])
def test_rows_of_one_request_share_its_keys_with_lengths_of_their_own(rows: int) -> None:
    inputs = index_inputs([70, 71, 72, 73, 0, 5, 2, 1], rows_per_request=rows)
    logits = mqa_logits(**inputs.arguments(), out=torch.full((8, 192), 123.0))
    for row, length in enumerate(inputs.lengths.tolist()):
        check(logits[row], inputs.scores(row))
        assert (logits[row, length:] == 123.0).all()


def test_rows_may_name_requests_in_any_order_and_not_all() -> None:
    inputs = index_inputs([70, 10, 30], seed=1)
    inputs.row_to_request = torch.tensor([0, 0, 2, 2, 0])
    inputs.q, inputs.weights = inputs.q[[0, 1, 2, 0, 1]], inputs.weights[[0, 1, 2, 0, 1]]
    inputs.lengths = torch.tensor([70, 3, 30, 29, 64])
    logits = mqa_logits(**inputs.arguments())
    for row in range(5):
        check(logits[row], inputs.scores(row))


def test_clean_writes_minus_infinity_past_each_length_up_to_the_width_and_nothing_else() -> None:
    inputs = index_inputs(LENGTHS)
    plain = mqa_logits(**inputs.arguments(), out=torch.full((8, 400), NAN))
    clean = mqa_logits(**inputs.arguments(), out=torch.full((8, 400), NAN), clean=True)
    for row, length in enumerate(LENGTHS):
        live = max(length, 0)
        assert torch.equal(clean[row, :live], plain[row, :live])
        assert (clean[row, live:] == -torch.inf).all() and plain[row, live:].isnan().all()


def test_scores_keep_the_sign_of_the_weights() -> None:
    """ReLU is inside the sum: a negative weight lowers the score below zero."""
    inputs = index_inputs([65], layout="exact")
    inputs.weights = -inputs.weights.abs()
    logits = mqa_logits(**inputs.arguments())
    assert (logits[0, :65] < 0).all()
    check(logits[0], inputs.scores(0))


@pytest.mark.parametrize("layout", ["index_fp8", "exact"])
def test_a_row_alone_equals_the_row_in_a_batch_with_nan_in_the_others(layout: str) -> None:
    inputs = index_inputs([130, 64, 200, 7], layout=layout, seed=3)
    together = mqa_logits(**inputs.arguments())
    slot = [inputs.slot(row, entry, 64) for row in (0, 3) for entry in range(int(inputs.lengths[row]))]
    if layout == "exact":
        inputs.cache.view(-1, 128)[slot] = NAN
        inputs.q[[0, 3]] = NAN
    else:
        for page in {s // 64 for s in slot}:
            inputs.cache[page] = 0xFF
        inputs.q.view(torch.uint8)[[0, 3]] = 0xFF
    inputs.weights[[0, 3]] = NAN
    poisoned = mqa_logits(**inputs.arguments())
    for row in (1, 2):
        length = int(inputs.lengths[row])
        alone = mqa_logits(
            inputs.q[row : row + 1], inputs.cache, inputs.weights[row : row + 1], inputs.lengths[row : row + 1],
            inputs.page_table[row : row + 1],
        )  # fmt: skip
        assert torch.equal(poisoned[row, :length], together[row, :length])
        assert torch.equal(alone[0, :length], together[row, :length])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_ragged_prefill_scores_each_row_between_its_own_bounds(dtype: torch.dtype) -> None:
    g = seeded(4)
    bounds = [(0, 50), (10, 11), (50, 50), (30, 20), (0, 0), (49, 50), (7, 33)]
    starts, ends = torch.tensor(bounds).int().T
    q, keys, weights = randn(g, 7, 16, 128) * 30, randn(g, 50, 128) * 30, randn(g, 7, 16)
    scales = None if dtype == torch.float32 else torch.rand(50, generator=g) + 0.01
    q, keys = q.to(dtype), keys.to(dtype)
    out = torch.full((7, 50), 123.0)
    assert mqa_logits_ragged(q, keys, scales, weights, starts, ends, out) is out
    for row, (start, end) in enumerate(bounds):
        live = torch.zeros(50, dtype=torch.bool)
        live[start:end] = True
        assert (out[row, ~live] == 123.0).all()
        if dtype == torch.float32:
            row_q, row_keys = wide(q[row]), wide(keys[start:end])
        else:
            row_q = E4M3[q[row].view(torch.uint8).numpy()]
            row_keys = E4M3[keys[start:end].view(torch.uint8).numpy()] * wide(scales[start:end])[:, None]
        check(out[row, live], np.maximum(row_keys @ row_q.T, 0.0) @ wide(weights[row]))


def test_ragged_rows_stand_alone() -> None:
    g = seeded(5)
    q, keys, weights = randn(g, 3, 4, 128), randn(g, 40, 128), randn(g, 3, 4)
    starts, ends = torch.tensor([0, 10, 25]), torch.tensor([10, 25, 40])
    want = mqa_logits_ragged(q, keys, None, weights, starts, ends)
    q[0], keys[:10], weights[2], keys[25:] = NAN, NAN, NAN, NAN
    got = mqa_logits_ragged(q, keys, None, weights, starts, ends)
    alone = mqa_logits_ragged(q[1:2], keys, None, weights[1:2], starts[1:2], ends[1:2])
    assert torch.equal(got[1, 10:25], want[1, 10:25]) and torch.equal(alone[0, 10:25], want[1, 10:25])


def test_ragged_work_follows_the_bounds_not_the_batch() -> None:
    """Two requests of 10 and 30 keys, 2 rows each, are 80 scores; the union of all keys for every row would be 160."""
    g = seeded(6)
    starts, ends = torch.tensor([0, 0, 10, 10]), torch.tensor([10, 10, 40, 40])
    with counting() as work:
        mqa_logits_ragged(randn(g, 4, 2, 128), randn(g, 40, 128), None, randn(g, 4, 2), starts, ends)
    assert work.keys_scored == 80


def test_no_rows_give_an_empty_result() -> None:
    inputs = index_inputs([3])
    logits = mqa_logits(
        inputs.q[:0], inputs.cache, inputs.weights[:0], inputs.lengths[:0], inputs.page_table, torch.empty(0).int()
    )
    assert logits.shape[0] == 0
