"""c4 and c128 against the pooling formula in float64: at once, in chunks, token by token, many requests in a batch."""

import numpy as np
import pytest
import torch

from tests.layouts.number_formats import bf16, index_key, v4_slot
from tests.ops.builders import NAN, frequencies, normed, randn, seeded, turn, walsh, wide
from thalweg.layouts import exact, index_fp8, v4
from thalweg.ops import CompressPlan, compress

FREQUENCIES = frequencies()


def entry(kv: np.ndarray, gate: np.ndarray, ape: np.ndarray, w: int, ratio: int) -> np.ndarray:
    """Entry w before norm and rope, from all tokens' raw kv and gate [T, w], by the loops of the design."""
    d = kv.shape[1] // 2 if ratio == 4 else kv.shape[1]
    slots = [(t, slice(kv.shape[1] - d, None)) for t in range(ratio * w, ratio * (w + 1))]
    if ratio == 4 and w > 0:
        slots += [(t, slice(0, d)) for t in range(4 * w - 4, 4 * w)]
    z = np.array([gate[t, half] + ape[t % ratio, half] for t, half in slots])
    values = np.array([kv[t, half] for t, half in slots])
    weight = np.exp(z - z.max(axis=0))
    return (weight * values).sum(axis=0) / weight.sum(axis=0)


def finished(pooled: np.ndarray, norm: np.ndarray, position: int, hadamard: bool = False) -> np.ndarray:
    row = turn(normed(pooled, norm), position, FREQUENCIES)
    return row @ walsh(len(row)) if hadamard else row


class Request:
    """A request's tokens, its row of the state and its entries' slots; `rows(a, b)` is what a chunk hands over."""

    def __init__(self, seed: int, tokens: int, d: int, ratio: int, state_slot: int, first_slot: int) -> None:
        g = seeded(seed)
        width = 2 * d if ratio == 4 else d
        self.ratio, self.state_slot, self.first_slot = ratio, state_slot, first_slot
        self.kv, self.gate = randn(g, tokens, width), randn(g, tokens, width) * 2

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(start, stop)
        complete = (positions + 1) % self.ratio == 0
        slots = torch.where(complete, self.first_slot + positions // self.ratio, -1)
        return self.kv[start:stop], self.gate[start:stop], positions, torch.full_like(positions, self.state_slot), slots


class Compressor:
    """The weights, a NaN-filled state and a cache; `step` runs one ragged batch."""

    def __init__(self, d: int, ratio: int, cache: torch.Tensor, hadamard: bool = False, state_slots: int = 6) -> None:
        g = seeded(77)
        width, ring = (2 * d, 8) if ratio == 4 else (d, 128)
        self.ratio, self.cache, self.hadamard = ratio, cache, hadamard
        self.ape, self.norm = randn(g, ratio, width), randn(g, d)
        self.state = torch.full((state_slots, ring, 2, width), NAN)

    def step(self, *parts: tuple[torch.Tensor, ...]) -> None:
        kv, gate, positions, state_slots, slots = (torch.cat(column) for column in zip(*parts, strict=True))
        compress(
            kv, gate, self.state, self.ape, CompressPlan(positions, state_slots, slots), self.norm, FREQUENCIES,
            self.cache, ratio=self.ratio, hadamard=self.hadamard,
        )  # fmt: skip

    def want(self, request: Request, w: int) -> np.ndarray:
        pooled = entry(wide(request.kv), wide(request.gate), wide(self.ape), w, self.ratio)
        return finished(pooled, wide(self.norm), w * self.ratio, self.hadamard)


def padding(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    none = torch.full((rows,), -1)
    return torch.full((rows, width), NAN), torch.full((rows, width), NAN), torch.zeros_like(none), none, none


def check_entries(compressor: Compressor, request: Request, count: int) -> None:
    slots = torch.arange(request.first_slot, request.first_slot + count)
    rows = wide(exact.read(compressor.cache, slots))
    for w in range(count):
        np.testing.assert_allclose(rows[w], compressor.want(request, w), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 64, 1000])
@pytest.mark.parametrize(("ratio", "tokens"), [(4, 41), (128, 261)])
def test_entries_are_the_same_whatever_the_chunks(ratio: int, tokens: int, chunk: int) -> None:
    """Prefill at once, in chunks across every boundary, and decode. The state begins as NaN: entry 0 reads none of it."""
    request = Request(1, tokens, 96, ratio, state_slot=2, first_slot=5)
    compressor = Compressor(96, ratio, exact.allocate(3, 8, 96))
    compressor.cache.fill_(NAN)
    for start in range(0, tokens, chunk):
        compressor.step(request.rows(start, min(start + chunk, tokens)))
    check_entries(compressor, request, tokens // ratio)
    rows_written = (~compressor.cache.isnan()).all(dim=-1).sum()
    assert rows_written == tokens // ratio


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_bits_do_not_depend_on_the_chunks(ratio: int) -> None:
    results = []
    for chunk in (1, 5, 300):
        request = Request(2, 300, 96, ratio, state_slot=0, first_slot=0)
        compressor = Compressor(96, ratio, exact.allocate(10, 8, 96))
        for start in range(0, 300, chunk):
            compressor.step(request.rows(start, min(start + chunk, 300)))
        results.append(compressor.cache)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("ratio", [4, 128])
def test_ragged_batches_of_requests_with_padding_give_each_its_own_entries(ratio: int) -> None:
    """Three requests at different positions, decode and prefill rows in one step, NaN padding before, between and after."""
    width = 192 if ratio == 4 else 96
    lengths = {4: (30, 9, 22), 128: (300, 140, 257)}[ratio]
    requests = [Request(10 + i, n, 96, ratio, state_slot=4 - i, first_slot=1 + 80 * i) for i, n in enumerate(lengths)]
    compressor = Compressor(96, ratio, exact.allocate(16, 16, 96))
    compressor.cache.fill_(NAN)
    at = [0, 0, 0]
    for sizes in [(1, 5, 0), (0, 1, 130), (2, 1, 1), (7, 3, 2), (129, 128, 1), (400, 400, 400)]:
        parts = [padding(2, width)]
        for i in (2, 0, 1):
            stop = min(at[i] + sizes[i], lengths[i])
            parts += [requests[i].rows(at[i], stop), padding(i, width)]
            at[i] = stop
        compressor.step(*parts)
    assert tuple(at) == lengths
    for request, tokens in zip(requests, lengths, strict=True):
        check_entries(compressor, request, tokens // ratio)
    assert int((~compressor.cache.isnan()).all(dim=-1).sum()) == sum(tokens // ratio for tokens in lengths)
    assert compressor.state[[0, 1, 5]].isnan().all()


def test_entry_zero_pools_its_own_four_slots_only() -> None:
    """Other requests' rows, stale state of the slot's last owner, and tokens 4.. have no part in it."""
    request = Request(20, 8, 96, 4, state_slot=1, first_slot=0)
    compressor = Compressor(96, 4, exact.allocate(1, 8, 96))
    compressor.state.normal_(generator=seeded(21))
    compressor.step(request.rows(0, 8))
    kv, gate, ape = wide(request.kv), wide(request.gate), wide(compressor.ape)
    z = gate[:4, 96:] + ape[:, 96:]
    weight = np.exp(z) / np.exp(z).sum(axis=0)
    want = finished((weight * kv[:4, 96:]).sum(axis=0), wide(compressor.norm), 0)
    np.testing.assert_allclose(wide(compressor.cache[0, 0, 0]), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ratio", "carried"), [(4, 4), (128, 0)])
def test_at_a_page_boundary_only_the_design_s_rows_are_carried(ratio: int, carried: int) -> None:
    """A prefix of 256 tokens reused from its pages: the open window is empty; c4 needs the four tokens before it, raw."""
    request = Request(30, 256 + ratio, 96, ratio, state_slot=3, first_slot=0)
    compressor = Compressor(96, ratio, exact.allocate(10, 8, 96))
    compressor.step(request.rows(0, 256))
    ring = compressor.state.shape[1]
    kept = compressor.state.clone()
    compressor.state.fill_(NAN)
    for position in range(256 - carried, 256):
        compressor.state[3, position % ring, :, :96] = kept[3, position % ring, :, :96]  # their [0, d) half
        assert torch.equal(kept[3, position % ring, 0], request.kv[position])
        assert torch.equal(kept[3, position % ring, 1], request.gate[position])  # raw: without the ape
    compressor.step(request.rows(256, 256 + ratio))
    check_entries(compressor, request, 256 // ratio + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [4, 128])
def test_main_entries_are_rounded_to_bf16_before_they_are_quantised(ratio: int, dtype: torch.dtype) -> None:
    """The bytes of the serving engines: norm and rope in float32 or better, bf16, then amax and e4m3."""
    request = Request(40, 2 * ratio, 512, ratio, state_slot=0, first_slot=3)
    request.kv, request.gate = request.kv.to(dtype), request.gate.to(dtype)
    compressor = Compressor(512, ratio, v4.allocate(4, 2))
    compressor.step(request.rows(0, 2 * ratio))
    without = 0
    for w in range(2):
        slot = 3 + w
        want = compressor.want(request, w)
        data, scales = v4_slot(bf16(want))
        stored, stored_scales = (block[slot // 2, slot % 2].numpy() for block in v4.blocks(compressor.cache))
        np.testing.assert_array_equal(stored, data)
        np.testing.assert_array_equal(stored_scales, scales)
        without += int((v4_slot(want)[0] != data).sum())
    assert without > 0  # else this test could not see the rounding


@pytest.mark.parametrize("hadamard", [False, True])
def test_index_keys_are_rotated_rounded_to_bf16_and_quantised_with_a_float32_scale(hadamard: bool) -> None:
    request = Request(50, 12, 128, 4, state_slot=0, first_slot=64)
    compressor = Compressor(128, 4, index_fp8.allocate(2), hadamard=hadamard)
    compressor.step(request.rows(0, 12))
    codes, scales = index_fp8.read_codes(compressor.cache, torch.arange(64, 67))
    without = 0
    for w in range(3):
        by_hand, scale = index_key(bf16(compressor.want(request, w)))
        np.testing.assert_array_equal(codes[w].view(torch.uint8).numpy(), by_hand)
        assert float(scales[w]) == scale
        without += int((index_key(compressor.want(request, w))[0] != by_hand).sum())
    assert without > 0
