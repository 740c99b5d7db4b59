"""The exact layout keeps float32 rows as they are, in pages with gaps too."""

import pytest
import torch

from thalweg.layouts import exact


@pytest.mark.parametrize("width", [128, 512, 576, 33])
def test_rows_come_back_bit_for_bit(width: int) -> None:
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(10, width, generator=generator)
    slots = torch.randperm(15, generator=generator)[:10].int()
    storage = torch.full((3, 5 * width + 7), float("nan"))
    cache = storage.as_strided((3, 5, 1, width), (5 * width + 7, width, width, 1))
    exact.write(cache, slots, rows)
    assert torch.equal(exact.read(cache, slots), rows)
    assert storage[:, 5 * width :].isnan().all()
    assert int(storage.isnan().sum()) == 3 * 7 + 5 * width


def test_a_slot_of_minus_one_is_not_stored() -> None:
    cache = exact.allocate(2, 4, 16)
    exact.write(cache, torch.tensor([-1, 3]), torch.ones(2, 16))
    assert cache.sum() == 16 and (cache[0, 3] == 1).all()
