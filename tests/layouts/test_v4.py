"""The v4 page, byte for byte: data block, then scale block, the stride from the tensor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.number_formats import e4m3_value, v4_slot, v4_values
from thalweg.layouts import v4


def golden_row() -> torch.Tensor:
    """One value in each group of 64, whose bytes are worked out in `test_golden_bytes`."""
    row = torch.zeros(512)
    row[0] = 448.0
    row[64 + 1] = 449.0
    row[128 + 2] = 1.0
    row[256 + 4] = -3.5
    row[320 + 5] = np.nextafter(np.float32(3.5), np.float32(4)).item()
    row[384 + 6] = 5e-5
    row[448], row[449], row[510], row[511] = 1.0, -2.5, 1.01171875, 1.00390625
    return row


def test_golden_bytes() -> None:
    """By hand, at page 1, slot 1 of a cache of 2 slots a page.

    Group 0: amax 448, scale 448/448 = 2^0 = code 127; 448 = 1.75 x 2^8 = 0 1111 110 = 0x7E.
    Group 1: amax 449, 449/448 just above 1, up to 2^1 = 128; 224.5 -> 224 = 1.75 x 2^7 = 0 1110 110 = 0x76.
    Group 2: amax 1, 1/448 = 2^-8.8, up to 2^-8 = 119; 1 x 2^8 = 256 = 0 1111 000 = 0x78.
    Group 3: zeros: amax floored to 1e-4, 1e-4/448 = 2^-22.09, up to 2^-22 = 105; codes 0.
    Group 4: amax 3.5, 3.5/448 = 2^-7 exactly = 120; -3.5 x 2^7 = -448 = 0xFE.
    Group 5: the float above 3.5: up to 2^-6 = 121; x 2^6 = 224 and a bit -> 0x76.
    Group 6: 5e-5 is under the floor: 105; 5e-5 x 2^22 = 209.7 -> 208 = 1.625 x 2^7 = 0 1110 101 = 0x75.
    bf16: 1 = 3F80, -2.5 = C020, 1 + 1.5 x 2^-7 -> even 1 + 2 x 2^-7 = 3F82, 1 + 0.5 x 2^-7 -> even 1 = 3F80, each low byte first.
    Page 1 starts at 1,728 (2 x 584 = 1,168, up to 3 x 576). Its slot 1: data at 1,728 + 576, scales at 1,728 + 1,152 + 8.
    """
    cache = v4.allocate(3, 2)
    storage = torch.as_strided(cache, (3 * 1728,), (1,))
    storage.fill_(0xAA)
    expected = storage.clone()
    data, scales = 1728 + 576, 1728 + 1152 + 8
    expected[data : data + 576] = 0
    for at, byte in {0: 0x7E, 65: 0x76, 130: 0x78, 260: 0xFE, 325: 0x76, 390: 0x75}.items():
        expected[data + at] = byte
    for at, pair in {0: (0x80, 0x3F), 1: (0x20, 0xC0), 62: (0x82, 0x3F), 63: (0x80, 0x3F)}.items():
        expected[data + 448 + 2 * at : data + 450 + 2 * at] = torch.tensor(pair, dtype=torch.uint8)
    expected[scales : scales + 8] = torch.tensor([127, 128, 119, 105, 120, 121, 105, 0], dtype=torch.uint8)

    v4.write(cache, torch.tensor([3]), golden_row().unsqueeze(0))

    assert storage.tolist() == expected.tolist()


@pytest.mark.parametrize(("page_slots", "stride"), [(256, 149_760), (64, 37_440), (2, 1_728)])
def test_page_strides_are_those_of_the_serving_engines(page_slots: int, stride: int) -> None:
    cache = v4.allocate(2, page_slots)
    assert (tuple(cache.shape), cache.stride(0)) == ((2, page_slots, 1, 584), stride)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_equal_an_encoder_written_from_the_definition(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = (torch.randn(40, 512, generator=generator) * torch.logspace(-5, 3, 40).unsqueeze(1)).to(dtype)
    data, scales = v4.encode(rows)
    for row, row_data, row_scales in zip(rows.float().numpy(), data.numpy(), scales.numpy(), strict=True):
        by_hand_data, by_hand_scales = v4_slot(row)
        np.testing.assert_array_equal(row_data, by_hand_data)
        np.testing.assert_array_equal(row_scales, by_hand_scales)


def test_every_code_and_the_extreme_scales_read_back_exactly() -> None:
    """Codes 0 to 255 under scale codes 127, 0 (2^-127), 254 (2^127) and 255 (NaN), written as raw bytes."""
    cache = v4.allocate(2, 4)
    raw = torch.as_strided(cache, (2, cache.stride(0)), (cache.stride(0), 1))
    scale_codes = [127, 0, 254, 255]
    for slot, scale in enumerate(scale_codes):
        raw[1, slot * 576 : slot * 576 + 256] = torch.arange(256, dtype=torch.uint8)
        raw[1, 4 * 576 + slot * 8 : 4 * 576 + slot * 8 + 7] = scale
    rows = v4.read(cache, torch.arange(4, 8))[:, :256].double().numpy()
    codes = np.array([e4m3_value(code) for code in range(256)])
    np.testing.assert_array_equal(rows[0], codes)
    np.testing.assert_array_equal(rows[1], codes * 2.0**-127)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rows[2], (codes * 2.0**127).astype(np.float32))
    assert np.isnan(rows[3]).all()


@pytest.mark.parametrize("page_slots", [1, 2, 16, 61, 64, 256])
def test_pages_with_gaps_give_the_packed_rows_and_the_gaps_stay(page_slots: int) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(3 * page_slots, 512, generator=generator)
    slots = torch.randperm(4 * page_slots, generator=generator)[: rows.shape[0]].int()
    packed = v4.allocate(4, page_slots)
    stride = packed.stride(0) + 1234
    storage = torch.full((17 + 4 * stride,), 0xFF, dtype=torch.uint8)
    cache = storage.as_strided((4, page_slots, 1, 584), (stride, 584, 584, 1), 17)

    v4.write(packed, slots, rows)
    v4.write(cache, slots, rows)

    assert torch.equal(v4.read(cache, slots), v4.read(packed, slots))
    outside = torch.ones(storage.shape[0], dtype=torch.bool)
    outside.as_strided((4, page_slots * 584), (stride, 1), 17).fill_(False)
    assert (storage[outside] == 0xFF).all()


def test_a_slot_of_minus_one_is_not_stored_and_neighbours_stay() -> None:
    cache = v4.allocate(2, 4)
    cache.fill_(0xAA)
    v4.write(cache, torch.tensor([-1, 5, -1]), torch.full((3, 512), float("nan")))
    untouched = torch.tensor([0, 1, 2, 3, 4, 6, 7])
    before = v4.allocate(2, 4)
    before.fill_(0xAA)
    assert torch.equal(v4.read(cache, untouched), v4.read(before, untouched))
    assert v4.read(cache, torch.tensor([5])).isnan().any()


def test_nan_and_infinity_poison_their_group_and_no_other() -> None:
    rows = torch.ones(2, 512)
    rows[0, 70], rows[1, 70] = float("nan"), float("inf")
    cache = v4.allocate(2, 2)
    v4.write(cache, torch.tensor([2, 3]), rows)
    back = v4.read(cache, torch.tensor([2, 3]))
    others = torch.arange(512) // 64 != 1
    assert (back[:, others] == 1).all() and back[:, 64:128].isnan().all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9), st.integers(-20, 20))
def test_round_trip_gives_the_defined_values_and_is_stable(values: list[float], exponent: int) -> None:
    row = (torch.tensor(values) * 2.0**exponent).repeat(512)[:512].unsqueeze(0)
    cache, slot = v4.allocate(1, 1), torch.tensor([0])
    v4.write(cache, slot, row)
    once = v4.read(cache, slot)
    np.testing.assert_array_equal(once[0].double().numpy(), v4_values(row[0].numpy()))
    v4.write(cache, slot, once)
    assert torch.equal(v4.read(cache, slot), once)
