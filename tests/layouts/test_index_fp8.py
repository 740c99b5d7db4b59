"""The index_fp8 page, byte for byte: 64 keys of codes, then 64 float32 scales."""

import numpy as np
import pytest
import torch

from tests.layouts.number_formats import E4M3, index_key
from thalweg.layouts import index_fp8


def test_golden_bytes() -> None:
    """By hand, at page 1, slots 3, 4, 5 (slot ids 67, 68, 69); page 1 starts at 8,448, its scales 64 x 128 = 8,192 later.

    Slot 3: amax 448, scale 1.0 = 0x3F800000; 448 = 0x7E, -2 = 1 1000 000 = 0xC0, 1.0625 -> even 1 = 0 0111 000 = 0x38.
    Slot 4: amax 1, scale 1/448 = 1.142857 x 2^-9 = 0x3B124925, low byte first; 1 x 448 = 0x7E, -0.25 -> -112 =
    -1.75 x 2^6 = 1 1101 110 = 0xEE.
    Slot 5: zeros: scale 1e-4/448 = 1.872457 x 2^-23 = 0x346FACAD; codes 0.
    """
    cache = index_fp8.allocate(2)
    storage = torch.as_strided(cache, (2 * 8448,), (1,))
    storage.fill_(0xAA)
    expected = storage.clone()
    keys = torch.zeros(3, 128)
    keys[0, 0], keys[0, 1], keys[0, 127] = 448.0, -2.0, 1.0625
    keys[1, 2], keys[1, 3] = 1.0, -0.25
    codes = 8448 + 3 * 128
    expected[codes : codes + 3 * 128] = 0
    for at, byte in {0: 0x7E, 1: 0xC0, 127: 0x38, 130: 0x7E, 131: 0xEE}.items():
        expected[codes + at] = byte
    scales = bytes.fromhex("0000803F 2549123B ADAC6F34")
    expected[8448 + 8192 + 12 : 8448 + 8192 + 24] = torch.tensor(list(scales), dtype=torch.uint8)

    index_fp8.write(cache, torch.tensor([67, 68, 69]), keys)

    assert storage.tolist() == expected.tolist()


def test_a_page_of_64_keys_is_8448_bytes() -> None:
    cache = index_fp8.allocate(3)
    assert (tuple(cache.shape), cache.stride(0)) == ((3, 64, 1, 132), 8448)


def test_bytes_equal_an_encoder_written_from_the_definition() -> None:
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(60, 128, generator=generator) * torch.logspace(-6, 4, 60).unsqueeze(1)
    codes, scales = index_fp8.encode(keys)
    for key, row, scale in zip(keys.numpy(), codes.view(torch.uint8).numpy(), scales.numpy(), strict=True):
        by_hand_codes, by_hand_scale = index_key(key)
        assert scale == by_hand_scale
        np.testing.assert_array_equal(row, by_hand_codes)


def test_every_code_reads_back_as_code_times_scale() -> None:
    cache = index_fp8.allocate(2)
    raw = cache.view(2, -1)
    raw[1, :256] = torch.arange(256, dtype=torch.uint8)
    raw[1, 8192:8200] = torch.tensor(list(np.array([3.0, 3.0], "<f4").tobytes()), dtype=torch.uint8)
    keys = index_fp8.read(cache, torch.tensor([64, 65]))
    np.testing.assert_array_equal(keys.flatten().numpy(), (E4M3 * 3).astype(np.float32))


@pytest.mark.parametrize("page_keys", [1, 16, 61, 64])
def test_pages_with_gaps_give_the_packed_keys_and_the_gaps_stay(page_keys: int) -> None:
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(2 * page_keys, 128, generator=generator)
    slots = torch.randperm(3 * page_keys, generator=generator)[: 2 * page_keys]
    packed = index_fp8.allocate(3, page_keys)
    stride = page_keys * 132 + 99  # scales end up at addresses that no float32 load would like
    storage = torch.full((3 * stride,), 0xFF, dtype=torch.uint8)
    cache = storage.as_strided((3, page_keys, 1, 132), (stride, 132, 132, 1))
    index_fp8.write(packed, slots, keys)
    index_fp8.write(cache, slots, keys)
    assert torch.equal(index_fp8.read(cache, slots), index_fp8.read(packed, slots))
    assert (storage.view(3, stride)[:, page_keys * 132 :] == 0xFF).all()


def test_a_slot_of_minus_one_is_not_stored() -> None:
    cache = index_fp8.allocate(2)
    cache.fill_(0x11)
    index_fp8.write(cache, torch.tensor([-1, -1]), torch.ones(2, 128))
    assert (cache == 0x11).all()
