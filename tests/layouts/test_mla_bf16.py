"""`mla_bf16` bytes worked out by hand."""

import pytest
import torch

from thalweg.layouts import mla_bf16


def golden_row() -> tuple[torch.Tensor, dict[int, str]]:
    """A row of 576 channels, and its bytes (hex, little endian) by offset in the slot; all other bytes are 0.

    bf16 is the upper half of float32: sign, 8 exponent bits of bias 127, 7 mantissa bits.
        1 -> 3F80; -2.5 = -1.25 x 2^1: exponent 128, mantissa 0100000 -> C020; 1 + 2^-8 is halfway between 3F80 and 3F81:
        even, 3F80; 1 + 3 x 2^-8 is halfway between 3F81 and 3F82: even, 3F82; 0.1 = 1.6 x 2^-4: 0.6 x 128 = 76.8 -> 77 =
        1001101, exponent 123 = 01111011 -> 3DCD; 65504 = 1.9990 x 2^15 rounds up to 2^16: exponent 143 -> 4780;
        2^-130, a subnormal, = 8 x 2^-133 -> 0008; -0 -> 8000.
    """
    row = torch.zeros(576)
    row[:5] = torch.tensor([1.0, -2.5, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 0.1])
    row[510:514] = torch.tensor([65504.0, 2.0**-130, -0.0, 0.1])
    row[575] = -2.5
    return row, {0: "80 3F  20 C0  80 3F  82 3F  CD 3D", 1020: "80 47  08 00  00 80  CD 3D", 1150: "20 C0"}


def expected_bytes(parts: dict[int, str]) -> list[int]:
    slot = bytearray(1152)
    for offset, text in parts.items():
        data = bytes.fromhex(text)
        slot[offset : offset + len(data)] = data
    return list(slot)


@pytest.mark.parametrize("page_slots", [1, 2, 61, 256])
def test_a_slot_is_1152_bytes_at_page_times_stride_and_gaps_stay(page_slots: int) -> None:
    row, parts = golden_row()
    gap = 64
    stride = page_slots * 1152 + gap
    storage = torch.full((4 * stride,), 0xFF, dtype=torch.uint8)
    shape, strides = (4, page_slots, 1, 576), (stride // 2, 576, 576, 1)
    cache = storage.view(torch.bfloat16).as_strided(shape, strides)
    slot = 2 * page_slots + page_slots // 2
    mla_bf16.write(cache, torch.tensor([-1, slot]), torch.stack((row + 1, row)))
    start = 2 * stride + page_slots // 2 * 1152
    assert storage[start : start + 1152].tolist() == expected_bytes(parts)
    assert (storage[:start] == 0xFF).all() and (storage[start + 1152 :] == 0xFF).all()


def test_the_bytes_read_back_exactly_as_float32() -> None:
    _, parts = golden_row()
    cache = mla_bf16.allocate(2, 3)
    cache.view(torch.uint8)[1, 2, 0] = torch.tensor(expected_bytes(parts), dtype=torch.uint8)
    row = mla_bf16.read(cache, torch.tensor([5]))[0]
    expected = torch.zeros(576)
    tenth = (128 + 77) * 2.0**-11  # 3DCD
    expected[:5] = torch.tensor([1.0, -2.5, 1.0, 1 + 2.0**-6, tenth])
    expected[510:514] = torch.tensor([65536.0, 2.0**-130, 0.0, tenth])
    expected[575] = -2.5
    assert row.dtype == torch.float32 and torch.equal(row, expected)
    assert torch.signbit(row[512])


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="mla_bf16 cache"):
        mla_bf16.check(torch.zeros(2, 4, 1, 512, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="packed"):
        mla_bf16.check(torch.zeros(2, 8, 1, 576, dtype=torch.bfloat16)[:, ::2])
