"""Norm, rope and store by kernels: the reference's bytes in every layout; queries to a rounding."""

import pytest
import torch

from tests.interpreter import watching
from tests.ops.attention_kernels import DEVICE, interpreted, there_of
from tests.ops.builders import NAN, frequencies, randn, seeded
from tests.ops.store_kernels import LAYOUTS, allocate, check_index_query, check_query, check_store, stored
from thalweg.errors import UserError
from thalweg.layouts import exact, index_fp8, v4, v32
from thalweg.ops import dispatch, norm_rope_q, norm_rope_store, rope_quantise_index_q

pytestmark = pytest.mark.usefixtures("spoiled_norm_rope")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_bytes_of_the_reference(layout: str, dtype: torch.dtype) -> None:
    check_store(layout, rows=40, dtype=dtype)


@pytest.mark.parametrize("page_slots", [1, 2, 64, 256])
def test_pages_of_any_size(page_slots: int) -> None:
    for layout in ("v4", "index_fp8", "mla_bf16"):
        check_store(layout, rows=5, page_slots=page_slots)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-6, 1e3, 1e30])
def test_rows_of_any_size_with_weights_that_stretch_them(factor: float) -> None:
    """Zeros get the scale of the floor; norm weights of 1e-30 and 1e30 reach subnormals and large scales."""
    for layout in ("v4", "v32", "index_fp8"):
        check_store(layout, rows=3, weight=factor)


def test_amax_just_beside_a_power_of_two_gets_the_scale_of_the_layout() -> None:
    """448 x 2^k and its neighbours, which a rounded division could move: rows of 1 are their own norm, so weights are stored."""
    for bits in range(-2, 3):
        for value in (448.0, 1.0, 448.0 * 2**-20, 448.0 * 2**40, 2.0**-10, 1e-4):
            weight = torch.full((512,), value / 3)
            weight[::64] = (torch.tensor(value).view(torch.int32) + bits).view(torch.float32)
            check_store("v4", kv=torch.ones(1, 512), weight=weight, eps=0.0)


def test_bytes_of_nan_and_infinity() -> None:
    """In the same places as the reference's, and no other row's bytes change."""
    for layout in LAYOUTS:
        cache, kv = allocate(layout, 8), randn(seeded(3), 5, 128 if layout == "index_fp8" else 576)
        kv = kv if layout not in ("v4",) else kv[:, :512]
        want = stored(layout, cache, kv)
        kv[1], kv[3, 7] = NAN, torch.inf
        got = stored(layout, cache, kv)
        for before, after in zip(want, got, strict=True):
            for row in (0, 2, 4):
                assert torch.equal(before[row], after[row])
        check_store(layout, kv=kv)


def test_the_norm_may_cover_a_part_of_the_channels() -> None:
    """The MLA family: 512 of 576."""
    for layout in ("v32", "mla_bf16", "exact"):
        check_store(layout, rows=4, normed=512)


@pytest.mark.parametrize("width", [2, 8, 96, 200, 512, 1000])
def test_exact_rows_of_any_even_width(width: int) -> None:
    for pairs in {1, width // 2}:
        check_store("exact", kv=randn(seeded(width), 3, width), pairs=pairs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_views_with_gaps_and_64_bit_indices(dtype: torch.dtype) -> None:
    loose = torch.full((6, 640), NAN, dtype=torch.bfloat16)
    loose[:, 64:576] = randn(seeded(5), 6, 512).bfloat16()
    check_store("v4", kv=loose[:, 64:576], dtype_of_indices=dtype)
    check_store("v4", kv=loose[::2, 64:576], dtype_of_indices=dtype)
    check_store("v4", kv=loose[:, 64:576].t().contiguous().t(), dtype_of_indices=dtype)


@interpreted
def test_a_slot_that_is_none_or_outside_of_the_pool_is_not_written_and_its_row_not_read() -> None:
    cache = v4.allocate(2, 4)
    before = cache.untyped_storage().tolist()
    kv, weight = torch.full((4, 512), NAN), torch.ones(512)
    slots = torch.tensor([-1, 8, -9, 2**31 - 1])
    with watching() as accesses:
        norm_rope_store(
            kv, weight, frequencies(), torch.zeros(4, dtype=torch.int64), cache, slots, implementation="triton"
        )
    assert cache.untyped_storage().tolist() == before
    assert accesses.outside(slots) == 0
    with watching() as accesses:
        norm_rope_store(
            kv, weight, frequencies(), torch.arange(4), cache, torch.tensor([5, -1, -1, -1]), implementation="triton"
        )
    written = torch.tensor([address for addresses, _ in accesses.stores for address in addresses.tolist()])
    assert len(written) > 0 and (written >= cache.data_ptr() + cache.stride(0)).all()


def test_an_index_outside_the_pool_is_an_error_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(IndexError, match="norm_rope_store slots"):
        check_store("v4", kv=torch.ones(1, 512), slots=torch.tensor([10_000]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 512), (3, 5, 512), (2, 64, 128), (70, 2, 64), (2, 3, 574)])
def test_queries(rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
    check_query(rows, heads, width, dtype)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (3, 5), (2, 64), (17, 16)])
def test_queries_of_the_indexer(rows: int, heads: int, hadamard: bool, quantise: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_index_query(rows, heads, dtype, hadamard, quantise)


def test_queries_in_views_with_gaps_and_rows_of_padding() -> None:
    loose = torch.full((5, 9, 640), NAN, dtype=torch.bfloat16, device=DEVICE)
    inner = loose[:, 2:6, 64:576]
    inner.copy_(randn(seeded(6), 5, 4, 512))
    positions = torch.arange(5, device=DEVICE) * 1000
    want = norm_rope_q(inner.contiguous(), frequencies().to(DEVICE), positions, implementation="triton")
    assert torch.equal(norm_rope_q(inner, frequencies().to(DEVICE), positions, implementation="triton"), want)
    inner[1], inner[3, 2] = NAN, torch.inf
    got = norm_rope_q(inner, frequencies().to(DEVICE), positions, implementation="triton")
    assert torch.equal(got[::2], want[::2]) and torch.equal(got[3, [0, 1, 3]], want[3, [0, 1, 3]])
    assert got[1].isnan().all()


def test_no_rows_give_empty_results() -> None:
    none, f = torch.empty(0, dtype=torch.int64, device=DEVICE), frequencies().to(DEVICE)
    assert norm_rope_q(torch.empty(0, 4, 512, device=DEVICE), f, none, implementation="triton").shape == (0, 4, 512)
    q, weights = torch.empty(0, 4, 128, device=DEVICE), torch.empty(0, 4, device=DEVICE)
    codes, folded = rope_quantise_index_q(q, weights, f, none, hadamard=True, quantise=True, implementation="triton")
    assert (codes.shape, codes.dtype, folded.shape) == ((0, 4, 128), torch.float8_e4m3fn, (0, 4))
    cache = there_of(v4.allocate(1, 4))
    norm_rope_store(
        torch.empty(0, 512, device=DEVICE),
        torch.ones(512, device=DEVICE),
        f,
        none,
        cache,
        none,
        implementation="triton",
    )


def test_what_is_not_for_the_kernels_is_refused_with_the_reason() -> None:
    one, f = torch.zeros(1, dtype=torch.int64), frequencies(4)
    forced = {"implementation": "triton"}
    with pytest.raises(UserError, match="rows of 9 channels"):
        norm_rope_store(
            *map(there_of, (torch.zeros(1, 9), torch.ones(9), f, one, exact.allocate(1, 1, 9), one)), **forced
        )
    with pytest.raises(UserError, match="heads of 9 channels"):
        norm_rope_q(*map(there_of, (torch.zeros(1, 1, 9), f, one)), **forced)
    for module, width in ((v32, 576), (index_fp8, 128)):
        storage = torch.zeros(4 * module.allocate(1, 2).stride(0) + 2, dtype=torch.uint8)
        shape = module.allocate(1, 2).shape
        odd = storage.as_strided((2, *shape[1:]), (2 * module.allocate(1, 2).stride(0) + 1, shape[3], shape[3], 1))
        arguments = (torch.zeros(1, width), torch.ones(width), f, one, odd, one)
        with pytest.raises(UserError, match="not aligned"):
            norm_rope_store(*map(there_of, arguments), **forced)
    with pytest.raises(UserError, match="a rotation of heads of 96 channels"):
        arguments = (torch.zeros(1, 1, 96), torch.zeros(1, 1), f, one)
        rope_quantise_index_q(*map(there_of, arguments), hadamard=True, quantise=True, **forced)


def test_they_are_preferred_on_a_gpu_and_avoided_where_they_are_interpreted() -> None:
    for name in ("norm_rope_store", "norm_rope_q", "rope_quantise_index_q"):
        assert dispatch.resolve(name, DEVICE)[0].name == ("triton" if DEVICE.type == "cuda" else "reference")
