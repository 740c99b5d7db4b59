"""Norm, rope, quantise and store against the formulas in float64, down to the bytes."""

import numpy as np
import pytest
import torch

from tests.layouts.number_formats import bf16, index_key, v4_slot
from tests.ops.builders import NAN, frequencies, normed, randn, seeded, stored_value, turn, walsh, wide
from thalweg.layouts import exact, index_fp8, mla_bf16, v4, v32
from thalweg.ops import norm_rope_q, norm_rope_store, rope_quantise_index_q

POSITIONS = torch.tensor([0, 1, 5, 127, 4096, 1_048_575], dtype=torch.int32)
FREQUENCIES = frequencies()


def window_row(kv: np.ndarray, weight: np.ndarray, position: int, inverse_frequencies: torch.Tensor) -> np.ndarray:
    return turn(normed(kv, weight), position, inverse_frequencies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_v4_window_rows_are_not_rounded_to_bf16_before_they_are_quantised(dtype: torch.dtype) -> None:
    """Norm and rope in float32 or better from the inputs, one quantisation; only compressed entries pass through bf16."""
    g = seeded(1)
    kv, weight = (randn(g, 6, 512) * 3).to(dtype), randn(g, 512)
    cache = v4.allocate(4, 4)
    slots = torch.tensor([4, 15, 6, 9, 11, 8], dtype=torch.int32)
    norm_rope_store(kv, weight, FREQUENCIES, POSITIONS, cache, slots)
    differs_when_rounded = 0
    for row, (slot, position) in enumerate(zip(slots.tolist(), POSITIONS.tolist(), strict=True)):
        want = window_row(wide(kv[row]), wide(weight), position, FREQUENCIES)
        data, scales = v4_slot(want)
        blocks = [block[slot // 4, slot % 4].numpy() for block in v4.blocks(cache)]
        assert (blocks[0] != data).sum() == 0
        np.testing.assert_array_equal(blocks[1], scales)
        differs_when_rounded += int((v4_slot(bf16(want))[0] != data).sum())
    assert differs_when_rounded > 10  # else this test could not see the rounding


@pytest.mark.parametrize("layout", ["exact", "mla_bf16", "v32"])
def test_every_layout_stores_the_normed_and_turned_row(layout: str) -> None:
    g = seeded(2)
    kv, weight = randn(g, 6, 576), randn(g, 576)
    module = {"exact": exact, "mla_bf16": mla_bf16, "v32": v32}[layout]
    cache = exact.allocate(2, 8, 576) if layout == "exact" else module.allocate(2, 8)
    slots = torch.arange(8, 14)
    norm_rope_store(kv, weight, FREQUENCIES, POSITIONS, cache, slots)
    for row, position in enumerate(POSITIONS.tolist()):
        want = stored_value(layout, window_row(wide(kv[row]), wide(weight), position, FREQUENCIES))
        np.testing.assert_allclose(wide(module.read(cache, slots[row : row + 1])[0]), want, rtol=2e-7, atol=1e-7)


def test_a_slot_of_minus_one_stores_nothing_and_its_row_may_hold_anything() -> None:
    kv, weight = torch.full((3, 512), NAN), torch.ones(512)
    kv[1] = 1.0
    cache = v4.allocate(2, 4)
    cache.fill_(0x11)
    before = [block.clone() for block in v4.blocks(cache)]
    norm_rope_store(kv, weight, FREQUENCIES, torch.tensor([-7, 0, 3]), cache, torch.tensor([-1, 5, -1]))
    for block, old in zip(v4.blocks(cache), before, strict=True):
        old[1, 1] = block[1, 1]
        assert torch.equal(block, old)
    assert v4.read(cache, torch.tensor([5]))[0, :448].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_is_normed_per_head_without_weight_and_turned_with_one_rounding(dtype: torch.dtype) -> None:
    q = (randn(seeded(3), 6, 3, 512) * 5).to(dtype)
    out = norm_rope_q(q, FREQUENCIES, POSITIONS)
    assert out.dtype == dtype
    for t, position in enumerate(POSITIONS.tolist()):
        for head in range(3):
            want = turn(normed(wide(q[t, head])), position, FREQUENCIES)
            # Half a unit in the last place, the error of one rounding, and a hair for float64.
            step = 2.0**-24 if dtype == torch.float32 else 2.0**-8
            assert (np.abs(wide(out[t, head]) - want) <= step * np.abs(want) * (1 + 1e-6) + 1e-12).all()


@pytest.mark.parametrize("hadamard", [False, True])
def test_index_q_is_quantised_per_head_with_its_scale_folded_into_the_weight(hadamard: bool) -> None:
    g = seeded(4)
    q, weights = randn(g, 6, 16, 128) * 2, randn(g, 6, 16)
    q[2, 3] = 0.0
    codes, folded = rope_quantise_index_q(q, weights, FREQUENCIES, POSITIONS, hadamard=hadamard, quantise=True)
    assert (codes.dtype, folded.dtype) == (torch.float8_e4m3fn, torch.float32)
    rotation = walsh(128)
    for t, position in enumerate(POSITIONS.tolist()):
        for head in range(16):
            want = turn(wide(q[t, head]), position, FREQUENCIES)
            want = want @ rotation if hadamard else want
            by_hand, scale = index_key(want)
            np.testing.assert_array_equal(codes[t, head].view(torch.uint8).numpy(), by_hand)
            np.testing.assert_allclose(float(folded[t, head]), float(weights[t, head]) * float(scale), rtol=2e-7)


@pytest.mark.parametrize("hadamard", [False, True])
def test_index_q_for_the_exact_layout_is_float32_with_the_weights_as_they_were(hadamard: bool) -> None:
    g = seeded(5)
    q, weights = randn(g, 6, 2, 128), randn(g, 6, 2)
    turned, same = rope_quantise_index_q(q, weights, FREQUENCIES, POSITIONS, hadamard=hadamard, quantise=False)
    assert turned.dtype == torch.float32 and torch.equal(same, weights)
    for t, position in enumerate(POSITIONS.tolist()):
        want = turn(wide(q[t, 1]), position, FREQUENCIES)
        want = want @ walsh(128) if hadamard else want
        np.testing.assert_allclose(wide(turned[t, 1]), want, rtol=2e-7, atol=1e-7)


def test_index_q_in_bf16_is_turned_and_rotated_without_a_rounding_in_between() -> None:
    g = seeded(6)
    q, weights = randn(g, 6, 2, 128).bfloat16(), randn(g, 6, 2)
    codes, _ = rope_quantise_index_q(q, weights, FREQUENCIES, POSITIONS, hadamard=True, quantise=True)
    for t, position in enumerate(POSITIONS.tolist()):
        by_hand, _ = index_key(turn(wide(q[t, 0]), position, FREQUENCIES) @ walsh(128))
        np.testing.assert_array_equal(codes[t, 0].view(torch.uint8).numpy(), by_hand)


def test_rope_stands_on_the_last_channels_only_and_position_zero_changes_nothing() -> None:
    q = randn(seeded(7), 2, 1, 128)
    weights = torch.ones(2, 1)
    turned, _ = rope_quantise_index_q(q, weights, FREQUENCIES, torch.tensor([0, 9]), hadamard=False, quantise=False)
    assert torch.equal(turned[0], q[0])
    assert torch.equal(turned[1, :, :64], q[1, :, :64]) and (turned[1, :, 64:] != q[1, :, 64:]).any()


def test_a_row_alone_equals_the_row_in_a_batch_with_nan_around_it() -> None:
    g = seeded(8)
    kv, weight, positions = randn(g, 33, 512), randn(g, 512), torch.arange(33) * 977
    q, index_q, weights = randn(g, 33, 4, 512), randn(g, 33, 4, 128), randn(g, 33, 4)
    for tensor in (kv, q, index_q, weights):
        tensor[::2] = NAN

    def everything(rows: slice) -> list[torch.Tensor]:
        cache = v4.allocate(2, 40)
        slots = torch.arange(40, 73)[rows]
        norm_rope_store(kv[rows], weight, FREQUENCIES, positions[rows], cache, slots)
        codes, folded = rope_quantise_index_q(
            index_q[rows], weights[rows], FREQUENCIES, positions[rows], hadamard=True, quantise=True
        )
        return [v4.read(cache, slots), norm_rope_q(q[rows], FREQUENCIES, positions[rows]), codes.float(), folded]

    batch = everything(slice(None))
    for row in (1, 15, 31):
        for alone, together in zip(everything(slice(row, row + 1)), batch, strict=True):
            assert torch.equal(alone[0], together[row]) and not alone.isnan().any()


def test_index_keys_go_through_the_layout_of_their_cache_too() -> None:
    g = seeded(9)
    kv, weight = randn(g, 1, 128), randn(g, 128)
    cache = index_fp8.allocate(2)
    norm_rope_store(kv, weight, FREQUENCIES, torch.tensor([11]), cache, torch.tensor([70]))
    codes, scale = index_fp8.read_codes(cache, torch.tensor([70]))
    by_hand, by_hand_scale = index_key(window_row(wide(kv[0]), wide(weight), 11, FREQUENCIES))
    np.testing.assert_array_equal(codes[0].view(torch.uint8).numpy(), by_hand)
    assert float(scale) == by_hand_scale
