"""The compressor kernel gives the reference's entries and, bit for bit, its state: decode, verify rows, prefill, in one batch."""

import numpy as np
import pytest
import torch

from tests.interpreter import watching
from tests.ops.attention_kernels import DEVICE, interpreted, there_of
from tests.ops.builders import NAN, frequencies, wide
from tests.ops.compressor_kernels import Requests
from tests.ops.test_compressor import Request, entry, finished
from thalweg.errors import UserError
from thalweg.layouts import exact
from thalweg.ops import CompressPlan, compress, dispatch
from thalweg.ops.compressor import triton as kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 8, 9, 41])
def test_c4_in_chunks_of_any_size(chunk: int, dtype: torch.dtype) -> None:
    """Every way in which windows reach back into the ring, and in which the call's last rows overwrite what they read."""
    requests = Requests(4, "exact", dtype)
    for _ in range(0, 41, chunk):
        requests.step((2, min(chunk, 41 - requests.at[2])))
    got = requests.check()
    assert (got != 0).any(1).sum() > 10


@pytest.mark.parametrize(
    "sizes", [(1, 126, 1, 1, 127, 5), (127, 2, 130), (100, 100, 100), (300,), (129, 127), (3, 125, 128)]
)
def test_c128_in_chunks(sizes: tuple[int, ...]) -> None:
    requests = Requests(128, "exact")
    for rows in sizes:
        requests.step((1, rows))
    requests.check()


@pytest.mark.parametrize("layout", ["v4", "v32", "index_fp8", "mla_bf16", "exact"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_layouts(layout: str, ratio: int) -> None:
    requests = Requests(ratio, layout, page_slots=2)
    requests.step((3, 2 * ratio + 1), (0, ratio - 1))
    requests.step((0, 1), (3, 1))
    requests.check()


@pytest.mark.parametrize(
    ("layout", "ratio", "d"), [("index_fp8", 4, 0), ("v4", 4, 0), ("exact", 4, 128), ("exact", 128, 256)]
)
def test_the_rotation_of_index_keys(layout: str, ratio: int, d: int) -> None:
    requests = Requests(ratio, layout, hadamard=True, d=d)
    plain = Requests(ratio, layout, d=d)
    for each in (requests, plain):
        each.step((0, 2 * ratio), (1, ratio))
    assert not torch.equal(requests.check(), plain.check())


@pytest.mark.parametrize("ratio", [4, 128])
def test_ragged_batches_with_padding_around(ratio: int) -> None:
    """Decode rows, verify rows and a chunk of a prompt in one call; NaN between them."""
    requests = Requests(ratio, "exact")
    requests.step((0, ratio - 1), (5, 3), (2, 2 * ratio + 3), padding=2)
    requests.step((5, 1), (0, 1), (8, 1), padding=1)
    requests.step((2, 9), (8, 4), (0, 5), (5, 1))
    requests.step((1, 1), padding=3)
    requests.check()


def test_decode_rows_of_many_requests() -> None:
    requests = Requests(4, "v4", torch.bfloat16, states=64, slots=64 * 4, integers=torch.int32)
    requests.at = [slot % 4 for slot in range(64)]
    for each in requests.state.values():
        each.normal_(generator=torch.Generator(DEVICE).manual_seed(5))
    for _ in range(2):
        requests.step(*((slot, 1) for slot in range(64)))
    requests.check()


def test_the_pooling_written_out() -> None:
    """Against loops, not the reference."""
    request = Request(1, 12, 96, 4, state_slot=0, first_slot=0)
    state, cache = torch.full((1, 8, 2, 192), NAN), exact.allocate(1, 8, 96)
    ape, norm = torch.randn(4, 192), torch.randn(96)
    state, cache = there_of(state), there_of(cache)
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        kv, gate, *plan = request.rows(start, stop)
        compress(
            there_of(kv), there_of(gate), state, there_of(ape), CompressPlan(*map(there_of, plan)), there_of(norm),
            there_of(frequencies()), cache, ratio=4, implementation="triton",
        )  # fmt: skip
    for w in range(3):
        want = finished(entry(wide(request.kv), wide(request.gate), wide(ape), w, 4), wide(norm), 4 * w)
        np.testing.assert_allclose(wide(cache[0, w, 0].cpu()), want, rtol=2e-6, atol=3e-6)


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_bits_depend_neither_on_the_chunks_nor_on_other_rows(ratio: int) -> None:
    request = Request(7, 2 * ratio + 5, 96, ratio, state_slot=1, first_slot=0)
    ape, norm = torch.randn(ratio, request.kv.shape[1]), torch.randn(96)
    caches = []
    for chunk in (1, 3, 1000) if ratio == 4 else (100, 1000):
        for others in (0, 2):
            ring = 8 if ratio == 4 else 128
            state = there_of(torch.full((4, ring, 2, request.kv.shape[1]), NAN))
            caches.append(there_of(exact.allocate(1, 8, 96)))
            for start in range(0, len(request.kv), chunk):
                parts = request.rows(start, min(start + chunk, len(request.kv)))
                kv, gate, *plan = (
                    torch.cat((part.new_full((others, *part.shape[1:]), value), part))
                    for part, value in zip(parts, (NAN, NAN, 3, 2, -1), strict=True)
                )
                plan[0][:others] = torch.arange(3, 3 + others)
                compress(
                    there_of(kv), there_of(gate), state, there_of(ape), CompressPlan(*map(there_of, plan)),
                    there_of(norm), there_of(frequencies()), caches[-1], ratio=ratio, implementation="triton",
                )  # fmt: skip
    assert all(torch.equal(each, caches[0]) for each in caches) and not caches[0].isnan().any()


def test_entry_zero_reads_nothing_of_the_last_owner_of_its_state() -> None:
    requests = Requests(4, "exact")
    requests.step((0, 3))
    requests.step((0, 1))
    assert not requests.check().isnan().any()


def test_rows_that_complete_without_a_slot_are_carried_and_not_stored() -> None:
    requests = Requests(4, "exact")
    requests.step((0, 9), store=False)
    requests.step((0, 3))
    requests.check()


def test_values_that_are_not_finite_stay_in_their_entry() -> None:
    for value in (NAN, torch.inf):
        requests = Requests(4, "v4")
        requests.step((0, 8), (1, 4), kv=value)
        requests.step((2, 8), (3, 5))
        requests.check()


@interpreted
@pytest.mark.parametrize("ratio", [4, 128])
def test_padding_is_not_read_and_nothing_outside_of_the_arguments(ratio: int) -> None:
    """Slots outside of their pools are masked; a ring row is written once."""
    rows, width = 12, 192 if ratio == 4 else 96
    kv, gate = torch.randn(rows, width), torch.randn(rows, width)
    state, cache = torch.zeros(2, 8 if ratio == 4 else 128, 2, width), exact.allocate(2, 4, 96)
    positions = torch.arange(rows) + ratio - 4
    slots = torch.tensor([-1, 2, 9, 0, 0, 0, 0, 0, 0, 0, 0, -5])
    positions[3:11] = torch.arange(8) + ratio - 4
    entries = torch.tensor([0, 1, 2, 3, 4, 5, 8, -1, -1, -1, 7, 1])
    ape, norm, f = torch.randn(ratio, width), torch.randn(96), frequencies()
    plan = CompressPlan(positions, slots, entries)
    with watching() as accesses:
        compress(kv, gate, state, ape, plan, norm, f, cache, ratio=ratio, implementation="triton")
    real = (kv[3:11], gate[3:11])
    assert accesses.outside(*real, state[0], ape, positions, slots, entries, norm, f, cache) == 0
    assert accesses.stored_twice(state) == 0
    assert (state[1] == 0).all() and torch.equal(cache.flatten(0, 1).any(-1).flatten(), torch.arange(8) == 7) is (
        ratio == 4
    )


@interpreted
def test_a_place_of_the_ring_is_written_once_by_a_long_call() -> None:
    """On a GPU two writes have no order."""
    requests = Requests(4, "exact")
    with watching() as accesses:
        requests.step((0, 20), (1, 9), (2, 8))
    assert accesses.stored_twice(requests.state["triton"]) == 0
    requests.check()


def test_views_with_gaps() -> None:
    """kv and gate as halves of one projection, a state between others."""
    both = torch.randn(9, 500)
    pool = torch.full((3, 8, 3, 200), NAN)
    requests = Requests(4, "exact")
    requests.state = {name: there_of(pool.clone())[:, :, :2, 4:196] for name in requests.state}
    positions = torch.arange(9)
    entries = torch.where(positions % 4 == 3, 4 + positions // 4, -1)
    requests.call(both[:, :192], both[:, 250:442], positions, torch.full((9,), 1), entries)
    for name in requests.state:
        requests.state[name] = requests.state[name].contiguous()
    requests.check()


def test_no_rows_and_only_padding_change_nothing() -> None:
    requests = Requests(4, "v4")
    requests.step()
    requests.step(padding=3)
    assert requests.state["triton"].isnan().all()
    requests.check()


def test_positions_with_a_gap_are_an_error_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", "1")
    requests = Requests(4, "exact")
    plan = (torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([-1, -1]))
    with pytest.raises(IndexError, match="row 1 does not follow"):
        requests.call(torch.zeros(2, 192), torch.zeros(2, 192), *plan)
    with pytest.raises(IndexError, match="compress state_slots"):
        requests.call(
            torch.zeros(1, 192), torch.zeros(1, 192), torch.tensor([0]), torch.tensor([77]), torch.tensor([-1])
        )


def test_what_is_not_for_the_kernel_is_refused_with_the_reason() -> None:
    requests = Requests(4, "exact")
    kv, none = torch.zeros(1, 192), torch.zeros(1, dtype=torch.int64)
    requests.ape = requests.ape.bfloat16()
    with pytest.raises(UserError, match=r"ape of torch.bfloat16, they read float32"):
        requests.call(kv, kv, none, none, none)
    requests.ape = requests.ape.float()
    with pytest.raises(UserError, match=r"gate of torch.bfloat16 with kv of torch.float32"):
        requests.call(kv, kv.bfloat16(), none, none, none)
    assert kernels.compress_rejects(
        kv, kv, requests.state["triton"].transpose(2, 3).contiguous().transpose(2, 3), requests.ape, None,
        requests.norm, frequencies(), requests.caches["triton"], 4, False, 1e-6,
    )  # fmt: skip


def test_it_is_preferred_on_a_gpu_and_avoided_where_it_is_interpreted() -> None:
    assert dispatch.resolve("compress", DEVICE)[0].name == ("triton" if DEVICE.type == "cuda" else "reference")
