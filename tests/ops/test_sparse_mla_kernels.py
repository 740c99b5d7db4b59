"""The attention kernel gives what the reference gives: layouts, heads, widths, lengths, sinks, one and two caches."""

import math

import pytest
import torch

from tests.interpreter import watching
from tests.ops.attention_inputs import poison
from tests.ops.attention_kernels import DEVICE, SCALE, check, interpreted, made
from tests.ops.builders import NAN
from thalweg.errors import UserError
from thalweg.layouts import v4, v32
from thalweg.ops import dispatch
from thalweg.ops.sparse_mla import triton as kernels

LAYOUTS = ["v4", "v32", "mla_bf16"]


pytestmark = pytest.mark.usefixtures("spoiled_attention")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("two", [False, True])
def test_layouts_and_splits_of_one_and_two_caches(layout: str, split: int, two: bool, splits: dict[str, int]) -> None:
    splits["of"] = split
    inputs = made(layout, 3, 5, 70, 45 if two else 0, seed=split)
    check(inputs)
    inputs.lengths = torch.tensor([70, 0, 33])
    if inputs.extra is not None:
        inputs.extra = (*inputs.extra[:2], torch.tensor([0, 44, -7], dtype=torch.int32))
    check(inputs)


COVERING = [
    (64, 1, 1, "v4", 1),
    (128, 4, 2, "v4", 2),
    (133, 8, 16, "v32", 1),
    (192, 12, 61, "v4", 5),
    (256, 16, 64, "mla_bf16", 3),
    (512, 1, 256, "v4", 2),
    (1152, 8, 2, "v4", 4),
    (2048, 4, 64, "v32", 2),
    (2051, 4, 61, "v4", 1),
    (133, 32, 256, "v4", 2),
    (64, 64, 2, "v32", 1),
    (133, 96, 64, "v4", 1),
    (64, 128, 1, "mla_bf16", 2),
]


@pytest.mark.parametrize(("width", "heads", "page_slots", "layout", "split"), COVERING)
def test_widths_heads_and_page_sizes(
    width: int, heads: int, page_slots: int, layout: str, split: int, splits: dict[str, int]
) -> None:
    """Field case 10."""
    splits["of"] = split
    inputs = made(layout, 1, heads, width, page_slots=page_slots, seed=width)
    inputs.indices[0, ::3] = -1
    check(inputs)


def test_a_masked_first_chunk_equals_the_list_without_it(splits: dict[str, int]) -> None:
    """Field case 6: width 64, the first 16 indices -1, 48 valid; also a first tile, and a first split, of nothing."""
    for masked, split in ((16, 1), (32, 1), (64, 1), (64, 2), (80, 3)):
        splits["of"] = split
        inputs = made("v4", 2, 4, 128)
        inputs.indices[:, :masked] = -1
        out, lse = check(inputs)
        assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("sink", [None, 3.0, -math.inf, math.inf])
@pytest.mark.parametrize("split", [1, 2])
def test_nothing_to_attend_gives_zero_and_minus_infinity(
    sink: float | None, split: int, splits: dict[str, int]
) -> None:
    """Field case 7: all -1, or length 0; slot 0 of the cache full of NaN codes and scales."""
    splits["of"] = split
    inputs = made("v4", 4, 2, 40, 8, sink=False)
    poison(inputs.cache)
    poison(inputs.extra[0])
    inputs.indices.zero_()
    inputs.indices[:2] = -1
    inputs.lengths = torch.tensor([40, 0, 0, -1])
    inputs.extra = (inputs.extra[0], inputs.extra[1].zero_(), torch.zeros(4, dtype=torch.int32))
    inputs.sink = None if sink is None else torch.full((2,), sink)
    out, lse = check(inputs)
    assert (out == 0).all() and (lse == -math.inf).all()
    inputs.extra = None
    inputs.indices, inputs.lengths = torch.empty(4, 0, dtype=torch.int32), None
    out, lse = check(inputs)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("sink", [None, -math.inf, 50.0, math.inf])
def test_the_sink_counts_once_and_the_lse_never_holds_it(
    sink: float | None, split: int, splits: dict[str, int]
) -> None:
    splits["of"] = split
    inputs = made("v4", 2, 3, 90, sink=False)
    _, lse = check(inputs)
    inputs.sink = None if sink is None else torch.full((3,), sink)
    assert torch.equal(check(inputs)[1], lse)


def test_several_splits_give_what_one_gives(splits: dict[str, int]) -> None:
    inputs = made("v4", 2, 3, 100, 70)
    results = []
    for splits["of"] in (1, 2, 5, 13):  # 13: more than there are tiles
        results.append(check(inputs))
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=2**-7, atol=2e-3)
        torch.testing.assert_close(lse, results[0][1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_of_any_stride_and_integer(dtype: torch.dtype) -> None:
    inputs = made("v4", 3, 4, 50, 40)
    want = inputs.run("triton")
    inputs.indices = inputs.indices.to(dtype).T.contiguous().T
    inputs.extra = (inputs.extra[0], torch.stack([inputs.extra[1]] * 2, -1)[..., 0], None)
    inputs.q = torch.stack([inputs.q] * 2, -1)[..., 0]
    assert all(torch.equal(a, b) for a, b in zip(inputs.run("triton"), want, strict=True))
    inputs.q = torch.cat([inputs.q, inputs.q], 1)[:, :4].contiguous().transpose(0, 1).contiguous().transpose(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(inputs.run("triton"), want, strict=True))


@pytest.mark.parametrize("split", [1, 2])
def test_slots_outside_the_pool_are_masked_and_raise_in_debug_mode(
    split: int, splits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits["of"] = split
    inputs = made("v4", 2, 2, 70, 5)
    slots = inputs.cache.shape[0] * 64
    inputs.indices = inputs.indices.long()
    inputs.indices[0, 5:10] = torch.tensor([slots, -2, 2**31, 2**32 + 64, -(2**40)])
    inputs.extra[1][0, 1] = inputs.extra[0].shape[0] * 16  # in the pool of the other cache
    assert inputs.extra[1][0, 1] < slots
    inputs.lengths = torch.tensor([70, 40])
    inputs.indices[1, 40:] = slots  # past the length: never looked at
    check(inputs)
    monkeypatch.setenv("THALWEG_CHECK", "1")
    said = []
    for implementation in ("reference", "triton"):
        with pytest.raises(IndexError, match="indices: 5 active indices outside the pool") as caught:
            inputs.run(implementation)
        said.append(str(caught.value))
    assert said[0] == said[1]
    inputs.indices[0, 5:10] = -1
    with pytest.raises(IndexError, match="indices: 1 active indices"):
        inputs.run("triton")
    inputs.extra[1][0, 1] = -1
    check(inputs)
    inputs.extra[1][1, 2] = -5
    with pytest.raises(IndexError, match="1 active indices"):
        inputs.run("triton")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch_with_nan_in_the_others(layout: str) -> None:
    inputs = made(layout, 5, 3, 120, 30, seed=3)
    inputs.lengths = torch.tensor([120, 119, 3, 41, 0])
    together = check(inputs, deterministic=True)
    inputs.q[::2] = NAN
    poisoned = inputs.run("triton", deterministic=True)
    for row in (1, 3):
        alone = inputs.part(slice(row, row + 1)).run("triton", deterministic=True)
        for result in (0, 1):
            assert torch.equal(poisoned[result][row], together[result][row])
            assert torch.equal(alone[result][0], together[result][row])


def test_deterministic_splits_follow_the_lists_width_alone() -> None:
    choice = kernels.choices.Choice(16, 32, 8, 2, 2)
    counts = {kernels.choices.splits_of(choice, programs, 20, 132, True) for programs in (1, 7, 64, 4096)}
    assert counts == {5}
    assert kernels.choices.splits_of(choice, 1, 0, 132, True) == 1


@pytest.mark.parametrize("programs", [1, 4, 16, 64, 128, 1000])
@pytest.mark.parametrize("tiles", [0, 1, 5, 20, 260])
def test_splits_fill_the_card_and_end_where_it_is_full(programs: int, tiles: int) -> None:
    choice = kernels.choices.Choice(64, 32, 8, 2, 1)
    splits = kernels.choices.splits_of(choice, programs, tiles, 132, False)
    assert 1 <= splits <= max(1, min(tiles, kernels.choices.MOST_SPLITS))
    assert splits == 1 or programs * splits <= 2 * 132
    if programs <= 16 and tiles >= 20:
        assert splits > 1


@pytest.mark.parametrize(("code", "query"), [(0, 2.0**120), (1, 2.0**120), (240, 2.0**-106), (255, 1.0)])
def test_ue8m0_scales_at_the_ends_of_their_range(code: int, query: float) -> None:
    """2^-127, a subnormal, 2^-126, 2^113, and NaN, under codes of finite values."""
    inputs = made("v4", 2, 2, 40, sink=False)
    slot = int(inputs.indices[1, 3])
    data, scales = v4.blocks(inputs.cache)
    data[slot // 64, slot % 64, :64] = 0x3C  # 1.5
    scales[slot // 64, slot % 64, 0] = code
    inputs.indices[0] = slot if code != 255 else int(inputs.indices[0, 0])
    inputs.q[0] = 0
    inputs.q[0, :, 5] = query
    inputs.q[1] *= min(query, 1)
    inputs.q[1, :, :64] = -inputs.q[
        1, :, :64
    ].abs()  # a scale of infinity would make its score -inf, and the entry none
    out, lse = check(inputs)
    assert out[1].isnan().any() == (code == 255)
    if code != 255:
        assert ((lse[0] - math.log(40)).abs() > 1e-4).all()


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1.5e-38, 1.999, 1e35, NAN])
def test_float32_scales_at_the_ends_of_their_range(scale: float) -> None:
    inputs = made("v32", 2, 2, 40, sink=False)
    slot = int(inputs.indices[1, 3])
    (block,) = v32.blocks(inputs.cache)
    block[slot // 64, slot % 64, :128] = 0x3C
    block[slot // 64, slot % 64, 512:516] = torch.tensor([scale]).view(torch.uint8)
    inputs.q[:, :, :128] = -inputs.q[:, :, :128].abs() * (1e-35 if scale > 2 else 1)
    out, _ = check(inputs)
    assert out[1].isnan().all() == math.isnan(scale)


@pytest.mark.parametrize("split", [1, 2])
def test_nan_in_an_attended_row_is_the_rows_own(split: int, splits: dict[str, int]) -> None:
    splits["of"] = split
    inputs = made("v4", 3, 2, 70)
    inputs.indices[1, 50] = 0  # NaN codes and scales
    out, _ = check(inputs)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def test_many_rows_take_several_launches_within_the_bound_of_scratch(
    splits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits["of"] = 2
    monkeypatch.setattr(kernels.choices, "SCRATCH_BYTES", 2 * 2 * 512 * 4 * 3)  # three rows
    taken, scratch = [], kernels.scratch

    def counted(rows, *args):
        taken.append(rows)
        return scratch(rows, *args)

    monkeypatch.setattr(kernels, "scratch", counted)
    inputs = made("v4", 7, 2, 70)
    inputs.lengths = torch.tensor([70, 3, 69, 0, 33, 64, 70])
    check(inputs)
    assert taken == [3, 3, 1]


def kept_scratch(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """All scratch that is taken from now on."""
    taken: list[torch.Tensor] = []
    scratch = kernels.scratch

    def kept(*args) -> tuple[torch.Tensor, torch.Tensor]:
        taken.extend(scratch(*args))
        return taken[-2], taken[-1]

    monkeypatch.setattr(kernels, "scratch", kept)
    return taken


def test_a_split_without_a_tile_writes_no_partial_result(
    splits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits["of"] = 4
    taken = kept_scratch(monkeypatch)
    inputs = made("v4", 3, 2, 2000)
    inputs.lengths = torch.tensor([5, 0, 128])  # of 2,000: tiles are divided by what is there
    check(inputs)
    written = taken[0].isfinite().all(-1).all(-1).sum(1).tolist()
    assert written[:2] == [1, 0] and written[2] in (2, 4)
    assert not taken[1].isnan().any()


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [1, 3])
def test_nothing_beside_the_arguments_is_read_and_no_result_written_twice(
    layout: str, split: int, splits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits["of"] = split
    inputs = made(layout, 3, 5, 70, 45, page_slots=16)
    inputs.indices[0, 3:30] = -1
    inputs.indices[1, 40:] = 2**31 - 1
    inputs.lengths = torch.tensor([70, 40, 0])
    live = [inputs.q, inputs.indices, inputs.lengths, inputs.sink, inputs.extra[1]]
    taken = kept_scratch(monkeypatch)
    with watching() as accesses:
        out, lse = inputs.run("triton")
    assert accesses.stored_twice(out) == 0 and accesses.stored_twice(lse) == 0
    for cache in (inputs.cache, inputs.extra[0]):
        pages = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
        live.append(pages[1:])  # page 0 is in no list
    assert accesses.outside(*live, out, lse, *taken) == 0


def unaligned(cache: torch.Tensor) -> torch.Tensor:
    return torch.zeros(cache.numel() + 9, dtype=torch.uint8)[1 : 1 + cache.numel()].view(cache.shape)


REFUSED = {
    "float32 queries": (lambda i: setattr(i, "q", i.q.float()), "q of torch.float32, their products are of bfloat16"),
    "an exact cache": (lambda i: vars(i).update(vars(made("exact", 2, 3, 20))), "an exact cache"),
    "unaligned scales": (lambda i: setattr(i, "cache", unaligned(i.cache)), "the scales are not aligned"),
}


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.usefixtures("kernels_preferred")
def test_what_the_kernels_do_not_take_runs_by_the_reference_and_says_why(refused: str) -> None:
    change, reason = REFUSED[refused]
    inputs = made("v4", 2, 3, 20)
    change(inputs)
    arguments = (inputs.q, inputs.cache, inputs.indices, None, inputs.sink, None, None, None, SCALE, False)
    chosen, why = dispatch.resolve("sparse_mla", DEVICE, None, arguments)
    assert chosen.name == "reference" and reason in why
    with pytest.raises(UserError, match=reason):
        inputs.run("triton")


@pytest.mark.usefixtures("kernels_preferred")
def test_caches_of_two_layouts_are_refused() -> None:
    inputs, other = made("v32", 2, 3, 20), made("mla_bf16", 2, 3, 20)
    inputs.extra = (other.cache, other.indices, None)
    with pytest.raises(UserError, match="caches of two layouts, v32 and mla_bf16"):
        inputs.run("triton")


def test_no_rows_give_no_results() -> None:
    inputs = made("v4", 1, 3, 20).part(slice(0, 0))
    out, lse = inputs.run("triton")
    assert out.shape == (0, 3, 512) and lse.shape == (0, 3)


def test_views_with_gaps_between_pages_give_the_bits_of_the_packed_cache() -> None:
    """One layer of a pool that interleaves three: page stride three times the page, NaN in the others."""
    inputs = made("v4", 2, 3, 60)
    want = inputs.run("triton")
    cache = inputs.cache
    page = cache.stride(0)
    storage = torch.full((cache.shape[0], 3, page), 0xFF, dtype=torch.uint8)
    storage[:, 1] = cache.as_strided((cache.shape[0], page), (page, 1))
    inputs.cache = storage.as_strided(cache.shape, (3 * page, 584, 584, 1), page)
    assert all(torch.equal(a, b) for a, b in zip(inputs.run("triton"), want, strict=True))
