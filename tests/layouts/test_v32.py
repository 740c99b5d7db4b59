"""`v32` bytes worked out by hand."""

import pytest
import torch

from thalweg.layouts import v32


def golden_row() -> tuple[torch.Tensor, dict[int, str]]:
    """A row of 576 channels, and the bytes (hex) it must become, by offset in the slot; all other bytes are 0.

    e4m3: sign, 4 exponent bits of bias 7, 3 mantissa bits; 1.0 is 0 0111 000 = 38, 448 = 1.75 x 2^8 is 0 1111 110 = 7E.

    Group 0 (channels 0-127), amax 448: scale 1.0 = 3F800000.
        448 -> 7E; -1 -> B8; 1.0625 is halfway between 1 (38) and 1.125 (39): even, 38; 1.1875 is halfway between 1.125 (39)
        and 1.25 (3A): even, 3A; 2^-9, the smallest subnormal -> 01; 2^-10 is halfway between 0 and 2^-9: even, 00.
    Group 1, amax 3: scale 3 / 448 = 1.714285714 x 2^-8. Significand 1.714285714 x 2^23 = 14380470.86, rounded 14380471 =
        DB6DB7, without its leading one 5B6DB7; exponent 127 - 8 = 119 = 77: 3BDB6DB7.
        3 -> 448 (7E); 1.5 -> 224 = 1.75 x 2^7 (76); -0.75 -> -112 (EE).
    Group 2, all zero: the amax is clamped to 1e-4, not the scale: 1e-4 in float32 is 38D1B717, significand 13743895 x 2^-37.
        / 448 = / (7 x 2^6): 13743895 / 7 = 1963413.571, doubled into [2^23, 2^24): x 8 = 15707308.57, rounded 15707309 =
        EFACAD, without its leading one 6FACAD; exponent -37 - 6 - 3 = -46 = 23 - 69, so 2^-23 x 1.87: 127 - 23 = 104 =
        68: 346FACAD. Codes 00.
    Group 3, amax 896 = 2 x 448: scale 2 = 40000000. -896 -> -448 (FE); 3 -> 1.5 (3C); 0.1 -> 0.05 = 1.6 x 2^-5, the
        grid there is 2^-8: 12.8 -> 13 = 1.625 x 2^-5: 0 0010 101 (15).
    Rope, bf16: 1 -> 3F80; -2.5 = -1.25 x 2^1 -> C020; 1 + 2^-8 is halfway between 3F80 and 3F81: even, 3F80; 1 + 3 x 2^-8 is
        halfway between 3F81 and 3F82: even, 3F82; 2^-130, a subnormal, = 8 x 2^-133 -> 0008.
    """
    row = torch.zeros(576)
    row[:6] = torch.tensor([448.0, -1.0, 1.0625, 1.1875, 2.0**-9, 2.0**-10])
    row[128:131] = torch.tensor([3.0, 1.5, -0.75])
    row[384:387] = torch.tensor([-896.0, 3.0, 0.1])
    row[512:517] = torch.tensor([1.0, -2.5, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-130])
    expected = {
        0: "7E B8 38 3A 01 00",
        128: "7E 76 EE",
        384: "FE 3C 15",
        512: "00 00 80 3F  B7 6D DB 3B  AD AC 6F 34  00 00 00 40",  # the scales, little endian
        528: "80 3F  20 C0  80 3F  82 3F  08 00",  # the rope channels, little endian
    }
    return row, expected


def expected_bytes(parts: dict[int, str]) -> list[int]:
    slot = bytearray(656)
    for offset, text in parts.items():
        data = bytes.fromhex(text)
        slot[offset : offset + len(data)] = data
    return list(slot)


def test_a_row_becomes_the_bytes_worked_out_by_hand() -> None:
    row, parts = golden_row()
    cache = v32.allocate(3, 4)
    v32.write(cache, torch.tensor([2 * 4 + 1]), row.unsqueeze(0))
    assert cache[2, 1, 0].tolist() == expected_bytes(parts)


def test_the_bytes_read_back_as_code_times_scale() -> None:
    """From the bytes alone: 7E = 448, B8 = -1, ... times each group's scale, the product rounded to float32 once."""
    _, parts = golden_row()
    cache = v32.allocate(2, 2)
    cache[1, 1, 0] = torch.tensor(expected_bytes(parts), dtype=torch.uint8)
    row = v32.read(cache, torch.tensor([3]))[0]
    three_448ths = 14380471 * 2.0**-31  # 3BDB6DB7
    expected = torch.zeros(576, dtype=torch.float64)
    expected[:6] = torch.tensor([448.0, -1.0, 1.0, 1.25, 2.0**-9, 0.0])
    expected[128:131] = torch.tensor([448 * three_448ths, 224 * three_448ths, -112 * three_448ths])
    expected[384:387] = torch.tensor([-896.0, 3.0, 2 * 13 * 2.0**-8])
    expected[512:517] = torch.tensor([1.0, -2.5, 1.0, 1 + 2.0**-6, 2.0**-130])
    assert torch.equal(row, expected.float())


def test_a_slot_lies_at_page_times_stride_plus_656_a_slot_and_gaps_stay() -> None:
    stride = 5 * 656 + 100
    storage = torch.full((4 * stride,), 0xFF, dtype=torch.uint8)
    cache = storage.as_strided((4, 5, 1, 656), (stride, 656, 656, 1))
    row, parts = golden_row()
    v32.write(cache, torch.tensor([2 * 5 + 3, -1]), torch.stack((row, row)))
    start = 2 * stride + 3 * 656
    assert storage[start : start + 656].tolist() == expected_bytes(parts)
    assert (storage[:start] == 0xFF).all() and (storage[start + 656 :] == 0xFF).all()
    assert torch.equal(v32.read(cache, torch.tensor([13]))[0], v32.decode(storage[start : start + 656].unsqueeze(0))[0])


def test_nan_codes_and_scales_decode_to_nan() -> None:
    cache = v32.allocate(1, 1)
    cache[0, 0, 0, 5] = 0x7F  # e4m3 NaN
    cache[0, 0, 0, 516:520] = 0xFF  # scale of group 1: float32 NaN
    row = v32.read(cache, torch.tensor([0]))[0]
    assert row.isnan().nonzero().squeeze(1).tolist() == [5, *range(128, 256)]


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="v32 cache"):
        v32.check(torch.zeros(2, 4, 1, 584, dtype=torch.uint8))
    with pytest.raises(ValueError, match="packed"):
        v32.check(torch.zeros(2, 8, 1, 656, dtype=torch.uint8)[:, ::2])
