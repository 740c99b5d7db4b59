"""Rule 5: an active index out of its pool raises with THALWEG_CHECK=1 and is masked otherwise, never dereferenced.

Every pool is NaN outside the rows that the operation may read, so a masked index that is followed shows in the result.
"""

from collections.abc import Callable

import pytest
import torch

from tests.ops.attention_inputs import filled
from tests.ops.builders import frequencies, randn, seeded
from tests.ops.index_inputs import index_inputs
from tests.ops.test_compressor import Compressor, Request
from thalweg.layouts import exact, v4
from thalweg.ops import index_topk, kv_compact, mqa_logits, mqa_logits_ragged, norm_rope_store, sparse_mla
from thalweg.ops.checks import debug_checks

FAR = [2**31 - 1, 3 * 64, -2, -(2**31)]  # pools here have 3 pages of 64: slots 0 to 191


def attend(bad: int, *, extra: bool = False) -> tuple[torch.Tensor, ...]:
    g = seeded(1)
    cache, _ = filled(g, "v4", 3, 64)
    q = randn(g, 2, 2, 512)
    indices = torch.tensor([[64, bad, 70, -1], [65, 66, -1, bad]]).int()
    if extra:
        return sparse_mla(q, cache, torch.tensor([[64], [65]]), extra=(cache, indices, None), scale=0.05)
    return sparse_mla(q, cache, indices, scale=0.05)


def attend_extra(bad: int) -> tuple[torch.Tensor, ...]:
    return attend(bad, extra=True)


def store(bad: int) -> tuple[torch.Tensor, ...]:
    cache = v4.allocate(3, 64)
    cache.fill_(0x11)
    kv = randn(seeded(2), 3, 512)
    norm_rope_store(kv, torch.ones(512), frequencies(), torch.arange(3), cache, torch.tensor([64, bad, 191]).int())
    return (cache,)


def carry(bad: int) -> tuple[torch.Tensor, ...]:
    compressor = Compressor(96, 4, exact.allocate(3, 64, 96))
    kv, gate, positions, state_slots, slots = Request(3, 8, 96, 4, 1, 70).rows(0, 8)
    compressor.step((kv, gate, positions, state_slots, torch.where(slots == 70, bad, slots)))
    return compressor.cache, compressor.state.nan_to_num(123.0)


def carry_state(bad: int) -> tuple[torch.Tensor, ...]:
    compressor = Compressor(96, 4, exact.allocate(3, 64, 96), state_slots=3)
    first, second = Request(4, 8, 96, 4, 1, 70), Request(5, 8, 96, 4, bad, 80)
    compressor.step(first.rows(0, 8), second.rows(0, 8))
    return compressor.cache, compressor.state.nan_to_num(123.0)


def move(sources: list[int], targets: list[int]) -> tuple[torch.Tensor, ...]:
    cache = exact.allocate(3, 64, 4)
    cache.view(192, 4).copy_(torch.arange(192).view(192, 1).expand(192, 4))
    kv_compact([cache], torch.tensor(sources), torch.tensor(targets))
    return (cache,)


def move_from(bad: int) -> tuple[torch.Tensor, ...]:
    return move([64, bad], [65, 66])


def move_to(bad: int) -> tuple[torch.Tensor, ...]:
    return move([64, 67], [65, bad])


CASES: list[Callable[[int], tuple[torch.Tensor, ...]]] = [
    attend, attend_extra, store, carry, carry_state, move_from, move_to,
]  # fmt: skip


@pytest.mark.parametrize("operation", CASES)
@pytest.mark.parametrize("bad", FAR)
def test_an_index_out_of_the_pool_raises_in_debug_mode_and_counts_as_none_otherwise(
    operation: Callable[[int], tuple[torch.Tensor, ...]], bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THALWEG_CHECK", raising=False)
    for masked, none in zip(operation(bad), operation(-1), strict=True):
        assert torch.equal(masked, none) and not masked.isnan().any()
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(IndexError, match=str(bad)):
        operation(bad)
    operation(-1)


@pytest.mark.parametrize("layout", ["index_fp8", "exact"])
@pytest.mark.parametrize("bad", [2**31 - 1, 9, -2, 2**26 + 1])  # (2^26 + 1) x 64 is 64 in 32 bits: somebody's slot
def test_a_live_page_out_of_the_pool_scores_minus_infinity_and_has_no_slot(
    layout: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THALWEG_CHECK", raising=False)
    inputs = index_inputs([200, 130], layout=layout, seed=1)  # a pool of 1 + 2 x 4 + 2 pages, the last two NaN
    inputs.cache = inputs.cache[:9]
    whole = mqa_logits(**inputs.arguments())
    chosen, _ = index_topk(**inputs.arguments(), k=130)
    inputs.page_table[0, 1] = bad
    logits = mqa_logits(**inputs.arguments())
    assert (logits[0, 64:128] == -torch.inf).all()
    assert torch.equal(logits[0, :64], whole[0, :64]) and torch.equal(logits[0, 128:200], whole[0, 128:200])
    assert torch.equal(logits[1, :130], whole[1, :130])
    indices, slots = index_topk(**inputs.arguments(), k=150)
    lost = (indices[0] >= 64) & (indices[0] < 128)
    assert int(lost.sum()) == 150 - (200 - 64)  # only because too few others are there
    assert (slots[0][lost] == -1).all() and (slots[0][~lost] >= 64).all()
    assert torch.equal(index_topk(**inputs.arguments(), k=130)[0][1], chosen[1])
    monkeypatch.setenv("THALWEG_CHECK", "1")
    for operation in (mqa_logits, lambda **arguments: index_topk(**arguments, k=8)):
        with pytest.raises(IndexError, match=str(bad)):
            operation(**inputs.arguments())


def test_a_page_of_minus_one_is_none_in_debug_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", "1")
    inputs = index_inputs([200], seed=2)
    inputs.page_table[0, 1] = -1
    assert (mqa_logits(**inputs.arguments())[0, 64:128] == -torch.inf).all()


def test_padding_rows_may_name_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", "1")
    inputs = index_inputs([70, 0, 0, -1], rows_per_request=2, seed=3)
    inputs.row_to_request = torch.tensor([0, -1, 10**6, -(10**6)])
    indices, slots = index_topk(**inputs.arguments(), k=16)
    assert (indices[0] >= 0).all() and (indices[1:] == -1).all() and (slots[1:] == -1).all()


@pytest.mark.parametrize("request_id", [2, -2, 10**9])
def test_a_live_row_of_a_request_that_is_not_in_the_table_is_empty(
    request_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THALWEG_CHECK", raising=False)
    inputs = index_inputs([70, 60], seed=4)
    inputs.row_to_request = torch.tensor([0, request_id])
    indices, slots = index_topk(**inputs.arguments(), k=16)
    assert (indices[0] >= 0).all() and (indices[1] == -1).all() and (slots[1] == -1).all()
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(IndexError, match="row_to_request"):
        index_topk(**inputs.arguments(), k=16)


def test_a_length_past_the_table_is_clipped_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THALWEG_CHECK", raising=False)
    inputs = index_inputs([128, 70], table_width=2, seed=5)
    want, want_slots = index_topk(**inputs.arguments(), k=200)
    inputs.lengths[0] = 100_000
    got, got_slots = index_topk(**inputs.arguments(), k=200)
    assert torch.equal(got, want) and torch.equal(got_slots, want_slots)
    assert mqa_logits(**inputs.arguments()).shape == (2, 128)
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(IndexError, match="lengths"):
        mqa_logits(**inputs.arguments())


def test_ragged_bounds_are_clipped_to_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THALWEG_CHECK", raising=False)
    g = seeded(6)
    q, keys, weights = randn(g, 2, 4, 128), randn(g, 10, 128), randn(g, 2, 4)

    def score(starts: list[int], ends: list[int]) -> torch.Tensor:
        out = torch.full((2, 10), 123.0)
        return mqa_logits_ragged(q, keys, None, weights, torch.tensor(starts), torch.tensor(ends), out)

    assert torch.equal(score([-7, 4], [5, 99]), score([0, 4], [5, 10]))
    assert torch.equal(score([20, 0], [30, -3]), torch.full((2, 10), 123.0))
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(IndexError, match="ends"):
        score([0, 4], [5, 99])


def test_only_live_entries_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries past a length are no error in debug mode: they are never looked at (index_inputs fills them so)."""
    monkeypatch.setenv("THALWEG_CHECK", "1")
    inputs = index_inputs([65, 0], seed=7)
    assert int((index_topk(**inputs.arguments(), k=80)[0] >= 0).sum()) == 65
    cache, _ = filled(seeded(8), "v4", 3, 64)
    indices = torch.tensor([[64, 2**31 - 1]])
    out, _ = sparse_mla(torch.ones(1, 1, 512), cache, indices, torch.tensor([1]), scale=0.05)
    assert out.isfinite().all()


@pytest.mark.parametrize("value", ["true", "2", "yes", " 1"])
def test_a_wrong_value_of_the_variable_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", value)
    with pytest.raises(ValueError, match=f"THALWEG_CHECK={value}.*0 or 1"):
        attend(-1)


@pytest.mark.parametrize(("value", "checks"), [("0", False), ("", False), ("1", True)])
def test_the_variable_is_zero_or_one(value: str, checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", value)
    assert debug_checks() is checks


def test_the_pools_of_these_tests_are_nan_where_nobody_may_read() -> None:
    cache, known = filled(seeded(9), "v4", 3, 64)
    assert v4.read(cache, torch.arange(64)).isnan().all() and min(known) == 64
