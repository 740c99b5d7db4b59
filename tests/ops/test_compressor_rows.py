"""The compressor's rows stand alone, and what is not to be stored is not stored."""

import pytest
import torch

from tests.ops.builders import NAN, wide
from tests.ops.test_compressor import Compressor, Request, entry, finished, padding
from thalweg.layouts import exact


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_request_alone_gives_the_bits_of_the_batch_with_nan_beside_it(ratio: int) -> None:
    def run(with_others: bool) -> tuple[torch.Tensor, torch.Tensor]:
        request = Request(1, 2 * ratio, 96, ratio, state_slot=2, first_slot=8)
        other = Request(2, 2 * ratio, 96, ratio, state_slot=3, first_slot=20)
        other.kv.fill_(NAN)
        other.gate.fill_(NAN)
        compressor = Compressor(96, ratio, exact.allocate(4, 8, 96))
        for start, stop in [(0, ratio - 1), (ratio - 1, ratio), (ratio, 2 * ratio)]:
            rows = [request.rows(start, stop)]
            if with_others:
                rows = [
                    other.rows(start, stop),
                    padding(3, request.kv.shape[1]),
                    *rows,
                    padding(1, request.kv.shape[1]),
                ]
            compressor.step(*rows)
        return compressor.cache[1, :2].clone(), compressor.state[2].clone()

    (alone, alone_state), (together, together_state) = run(False), run(True)
    assert torch.equal(alone, together) and not alone.isnan().any()
    assert torch.equal(alone_state.nan_to_num(), together_state.nan_to_num())


def test_a_completing_row_without_a_slot_is_carried_but_not_stored() -> None:
    request = Request(3, 8, 96, 4, state_slot=0, first_slot=0)
    compressor = Compressor(96, 4, exact.allocate(1, 8, 96))
    compressor.cache.fill_(NAN)
    kv, gate, positions, state_slots, slots = request.rows(0, 8)
    slots = torch.where(slots == 0, -1, slots)
    compressor.step((kv, gate, positions, state_slots, slots))
    reference = Compressor(96, 4, exact.allocate(1, 8, 96))
    reference.step(request.rows(0, 8))
    assert compressor.cache[0, 0].isnan().all()
    assert torch.equal(compressor.cache[0, 1], reference.cache[0, 1])


def test_rows_that_complete_nothing_write_the_state_and_nothing_else() -> None:
    request = Request(4, 3, 96, 4, state_slot=5, first_slot=0)
    compressor = Compressor(96, 4, exact.allocate(1, 8, 96))
    compressor.cache.fill_(NAN)
    compressor.step(request.rows(0, 3))
    assert compressor.cache.isnan().all() and compressor.state[:5].isnan().all()
    assert torch.equal(compressor.state[5, :3, 0], request.kv) and torch.equal(compressor.state[5, :3, 1], request.gate)


def test_only_padding_and_no_rows_at_all_change_nothing() -> None:
    compressor = Compressor(96, 4, exact.allocate(1, 8, 96))
    compressor.cache.fill_(NAN)
    compressor.step(padding(3, 192))
    compressor.step(padding(0, 192))
    assert compressor.cache.isnan().all() and compressor.state.isnan().all()


def test_the_same_request_may_stand_at_a_million_tokens() -> None:
    """RoPE at position 4w of an entry deep in the context, the angle formed in float32 of the whole position."""
    base = 1_048_572
    request = Request(6, 8, 96, 4, state_slot=0, first_slot=0)
    compressor = Compressor(96, 4, exact.allocate(1, 8, 96))
    kv, gate, positions, state_slots, _ = request.rows(0, 8)
    compressor.step((kv, gate, positions + base - 4, state_slots, torch.tensor([-1] * 7 + [0])))
    pooled = entry(wide(kv), wide(gate), wide(compressor.ape), 1, 4)
    want = torch.from_numpy(finished(pooled, wide(compressor.norm), base))
    torch.testing.assert_close(compressor.cache[0, 0, 0].double(), want, rtol=1e-6, atol=1e-6)
