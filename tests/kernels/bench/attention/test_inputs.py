import pytest
import torch

from thalweg.kernels.bench.attention import cases, inputs
from thalweg.kernels.bench.attention.cases import Decode, Prefill
from thalweg.layouts import v4, v32

CPU = torch.device("cpu")


def test_no_slot_is_read_twice_by_all_rows_of_all_sets() -> None:
    sets = inputs.make(Decode(3, 8, 192), 4, CPU, seed=1)
    for lists in ([one.indices for one in sets], [one.extra[1] for one in sets if one.extra is not None]):
        slots = torch.stack(lists)
        assert slots.dtype == torch.int32
        assert slots.unique().numel() == slots.numel()
        assert not torch.equal(slots.flatten(), slots.flatten().sort().values)
    assert sets[0].indices.shape == (3, 128)


@pytest.mark.parametrize(("entries", "page_slots"), [(640, 64), (1152, 2)])
def test_extra_entries_lie_on_the_pages_of_their_cache(entries: int, page_slots: int) -> None:
    (one,) = inputs.make(Decode(1, 8, entries), 1, CPU, seed=1)
    assert one.extra is not None
    cache, indices, lengths = one.extra
    assert one.cache.shape[1] == 256
    assert cache.shape[1] == page_slots
    assert int(indices.max()) < cache.shape[0] * page_slots
    assert (one.lengths.tolist(), lengths.tolist()) == ([128], [entries - 128])


def test_a_case_of_the_window_alone_or_of_v32_has_one_cache() -> None:
    (window,) = inputs.make(Decode(2, 8, 128), 1, CPU, seed=1)
    (whole,) = inputs.make(Decode(2, 8, 192, "v32"), 1, CPU, seed=1)
    assert window.extra is None and whole.extra is None
    assert (window.q.shape, window.scale) == ((2, 8, 512), 512**-0.5)
    assert (whole.q.shape, whole.indices.shape, whole.scale) == ((2, 8, 576), (2, 192), 576**-0.5)


def test_rows_decode_to_normal_numbers_and_the_seed_decides_them() -> None:
    one, same, other = (inputs.make(Decode(3, 8, 192), 1, CPU, seed)[0] for seed in (1, 1, 2))
    rows = v4.read(one.cache, one.indices.flatten())
    assert abs(float(rows.std()) - 1) < 0.02
    assert torch.equal(one.cache, same.cache) and torch.equal(one.q, same.q)
    assert not torch.equal(one.cache, other.cache)


def test_scales_of_v32_are_powers_of_two_which_bf16_holds() -> None:
    (one,) = inputs.make(Decode(2, 8, 128, "v32"), 1, CPU, seed=1)
    scales = one.cache.reshape(-1, 656)[:, 512:528].contiguous().view(torch.float32)
    assert bool((scales == 2.0**-7).all())
    assert abs(float(v32.read(one.cache, one.indices.flatten()).std()) - 1) < 0.05


def test_windows_of_a_chunk_slide_by_one_and_rows_choose_for_themselves() -> None:
    (one,) = inputs.make(Prefill(5, 8, 192), 1, CPU, seed=1)
    assert torch.equal(one.indices[1:, :-1], one.indices[:-1, 1:])
    assert one.extra is not None
    chosen = one.extra[1]
    assert all(row.unique().numel() == 64 for row in chosen)
    assert chosen.unique().numel() > 64 * 4


def test_all_rows_of_a_chunk_read_the_whole_context_at_ratio_128() -> None:
    (one,) = inputs.make(Prefill(5, 8, 1152), 1, CPU, seed=1)
    assert one.extra is not None
    chosen = one.extra[1]
    assert bool((chosen == chosen[0]).all())
    assert chosen[0].unique().numel() == 1024


def test_sets_are_rotated_until_they_leave_the_cache_within_reason() -> None:
    assert inputs.number_of_sets(Decode(256, 64, 8320)) == 1
    assert inputs.number_of_sets(Decode(1, 8, 128)) == inputs.MOST_SETS
    middle = Decode(16, 64, 640)
    assert inputs.number_of_sets(middle) * cases.bytes_moved(middle) > 2 * inputs.CACHED_BYTES
