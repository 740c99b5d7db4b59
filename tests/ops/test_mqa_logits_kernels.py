"""The kernels of mqa_logits score what the reference scores, write the columns that it writes, and say what they refuse."""

import numpy as np
import pytest
import torch

from tests.interpreter import watching
from tests.ops.builders import NAN, randn, seeded, wide
from tests.ops.index_inputs import IndexInputs, index_inputs
from tests.ops.index_kernels import (
    DEVICE,
    SCORING,
    UNTOUCHED,
    check_logits,
    check_scores,
    guarded,
    interpreted,
    moved,
    tolerance,
)
from thalweg.errors import UserError
from thalweg.ops import dispatch, hardware, mqa_logits, mqa_logits_ragged
from thalweg.ops.mqa_logits.triton import _runs

pytestmark = pytest.mark.usefixtures("few_programs")

LENGTHS = [0, 1, 63, 64, 65, 128, -3, 129]


def with_rows(inputs: IndexInputs, owners: list[int], lengths: list[int], seed: int = 0) -> IndexInputs:
    """The same cache and tables under rows of these requests and lengths."""
    g = seeded(seed)
    rows, heads = len(owners), inputs.q.shape[1]
    q = (randn(g, rows, heads, 128) * 50).to(torch.float8_e4m3fn)
    owner = torch.tensor(owners, dtype=torch.int32)
    counts = torch.tensor(lengths, dtype=torch.int32)
    return IndexInputs(q, inputs.cache, randn(g, rows, heads), counts, inputs.page_table, owner)


@pytest.mark.parametrize(
    ("page_keys", "heads", "rows", "implementation"),
    [
        (1, 4, 1, "triton"),
        (2, 8, 2, "triton"),
        (16, 1, 4, "triton"),
        (61, 12, 3, "triton"),
        (64, 16, 1, "triton"),
        (64, 32, 4, "triton"),
        (256, 64, 2, "triton"),
        (2, 12, 1, "triton_f16"),
        (61, 64, 2, "triton_f16"),
        (64, 4, 4, "triton_f16"),
        (128, 16, 1, "triton_f16"),
    ],
)
def test_scores_equal_the_reference_and_the_formula(page_keys: int, heads: int, rows: int, implementation: str) -> None:
    lengths = LENGTHS if rows != 3 else [*LENGTHS, 70]
    inputs = index_inputs(lengths, rows_per_request=rows, page_keys=page_keys, heads=heads, seed=page_keys + rows)
    got = check_logits(inputs, implementation)
    for row, length in enumerate(lengths):
        want = inputs.scores(row)
        if len(want):
            error = np.abs(wide(got[row, :length]) - want).max()
            assert error <= tolerance(implementation) * np.abs(want).max()


@pytest.mark.parametrize("implementation", SCORING)
@pytest.mark.parametrize(
    "owners",
    [
        [0, 0, 0, 0, 0, 1, 2, 2, 2],  # five rows of one: a run of four and one
        [2, 1, 1, 1, 1, 1, 1, 1, 0],  # a run begins where the owner changes, and where a run is full
        [0, 1, 0, 1, 0, 2, 2, 0, 1],  # nobody side by side
        [3, -1, 0, 0, -7, -7, 10**6, 2, 2],  # rows of no request
    ],
)
def test_requests_with_uneven_numbers_of_rows(owners: list[int], implementation: str) -> None:
    inputs = with_rows(index_inputs([150, 70, 131], seed=1), owners, [0, 1, 70, 64, 5, 70, 63, -1, 65])
    check_logits(inputs, implementation)


@pytest.mark.parametrize(("rows", "implementation"), [(1, "triton"), (4, "triton"), (2, "triton_f16")])
@pytest.mark.parametrize("page_keys", [16, 64])
def test_pages_that_are_no_pages_score_minus_infinity(page_keys: int, rows: int, implementation: str) -> None:
    inputs = index_inputs([200, 190, 180, 170], rows_per_request=rows, page_keys=page_keys, heads=4, seed=2)
    inputs.cache = inputs.cache[:-2]
    inputs.page_table[0, 1] = -1
    inputs.page_table[-1, 0] = inputs.cache.shape[0]
    inputs.page_table[-1, 2] = -(2**31)
    got = check_logits(inputs, implementation)
    assert (got[0, page_keys : 2 * page_keys] == -torch.inf).all()
    third = got[-1, 2 * page_keys : min(3 * page_keys, 170)]
    assert (got[-1, :page_keys] == -torch.inf).all() and (third == -torch.inf).all()


def test_lengths_past_the_table_end_with_it_and_integers_may_have_64_bits() -> None:
    inputs = index_inputs([128, 70], table_width=2, seed=3)
    inputs.lengths = torch.tensor([2**40, 70])
    inputs.page_table = inputs.page_table.long()
    inputs.page_table[1, 0] += 2**32  # a page of the pool, had it 32 bits
    inputs.row_to_request = torch.tensor([0, 2**32 + 1])
    got = check_logits(inputs, "triton")
    assert (got[1] == UNTOUCHED).all() and (got[0, :128] != UNTOUCHED).all()
    inputs.row_to_request = torch.tensor([0, 1])
    assert (check_logits(inputs, "triton")[1, :64] == -torch.inf).all()


@pytest.mark.parametrize("implementation", SCORING)
def test_clean_writes_minus_infinity_past_each_length_up_to_the_width(implementation: str) -> None:
    inputs = index_inputs(LENGTHS, seed=4)
    got = check_logits(inputs, implementation, clean=True)
    column = torch.arange(got.shape[1])
    live = column < inputs.lengths.unsqueeze(1)
    assert torch.equal(got == -torch.inf, ~live) and not got.isnan().any()


def test_clean_reaches_the_end_of_a_buffer_wider_than_a_block() -> None:
    inputs = index_inputs([70, 0], seed=5)
    out = torch.full((3, 9000), UNTOUCHED, device=DEVICE)
    mqa_logits(**moved(inputs).arguments(), out=out[:2, :8999], clean=True, implementation="triton")
    assert (out[0, 70:8999] == -torch.inf).all() and (out[1, :8999] == -torch.inf).all()
    assert (out[:2, 8999] == UNTOUCHED).all() and (out[2] == UNTOUCHED).all()


@pytest.mark.parametrize(("rows", "page_keys"), [(1, 64), (2, 16)])
def test_arguments_may_be_views_with_gaps(rows: int, page_keys: int) -> None:
    """Field case 8, in small: pages three apart with NaN between, and every other argument a part of something larger."""
    inputs = index_inputs([150, 70, 131, 64], rows_per_request=rows, page_keys=page_keys, heads=8, seed=6)
    want = check_logits(inputs, "triton")
    there = moved(inputs)
    page_bytes = page_keys * 132
    layers = torch.full((inputs.cache.shape[0], 3, page_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    layers[:, 1] = there.cache.flatten(1)
    cache = layers[:, 1].as_strided(there.cache.shape, (3 * page_bytes, 132, 132, 1), page_bytes)
    q = torch.full((4, 20, 160), 0xFF, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)[:, 2:18:2, 32:]
    q.copy_(there.q)
    doubled = {"weights": there.weights, "lengths": there.lengths, "row_to_request": there.row_to_request}
    parts = {name: each if each is None else torch.stack([each, each], -1)[..., 0] for name, each in doubled.items()}
    table = torch.full((inputs.page_table.shape[0], 40), -5, dtype=torch.int32, device=DEVICE)
    table = table[:, 3 : 3 + inputs.page_table.shape[1]].copy_(there.page_table)
    out = torch.full((4, want.shape[1] + 9), UNTOUCHED, device=DEVICE)
    mqa_logits(q, cache, page_table=table, out=out[:, 4:-5], **parts, implementation="triton")
    assert torch.equal(out[:, 4:-5].cpu(), want)
    assert (out[:, :4] == UNTOUCHED).all() and (out[:, -5:] == UNTOUCHED).all()
    assert (layers[:, [0, 2]] == 0xFF).all()


@interpreted
@pytest.mark.parametrize("implementation", SCORING)
@pytest.mark.parametrize("page_keys", [16, 64])
def test_each_score_is_written_once_and_nothing_beside_the_arguments_is_read(
    page_keys: int, implementation: str
) -> None:
    """A second store is a race, right or not; tables end with their live pages, and the last run with its first row."""
    owners, lengths = [0, 0, 0, 1, 2, 2, 2, 2, -1, 0, 2], [130, 129, 3, 131, 0, 70, 64, 65, 9, 130, 131]
    inputs = index_inputs([130, 131, 131], heads=5, page_keys=page_keys, table_width=-(-131 // page_keys), seed=16)
    inputs.page_table[2, 0] = inputs.cache.shape[0]
    for there in (guarded(with_rows(inputs, owners, lengths)), guarded(inputs)):
        out = torch.full((len(there.lengths), page_keys * there.page_table.shape[1]), UNTOUCHED)
        with watching() as accesses:
            mqa_logits(**there.arguments(), out=out, clean=True, implementation=implementation)
        tensors = [tensor for tensor in there.arguments().values() if tensor is not None]
        assert accesses.outside(*tensors, out) == 0
        assert accesses.stored_twice(out) == 0


def test_a_run_of_ragged_rows_reads_from_its_first_key_to_its_last() -> None:
    starts, ends = torch.tensor([40, 50, 9, 70, -4, 90, 20]), torch.tensor([60, 55, 9, 80, 3, 200, 30])
    first, reach = _runs(starts, ends, 100, 2)
    assert first.tolist() == [40, 70, 0, 20] and reach.tolist() == [20, 10, 100, 10]
    first, reach = _runs(torch.tensor([5, 7]), torch.tensor([5, 2]), 100, 2)
    assert reach.tolist() == [0]


@pytest.mark.parametrize(("heads", "rows"), [(4, 1), (16, 2)])
def test_e4m3_by_moving_bits_gives_the_scores_of_its_conversion(
    heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 14: sm_80 has no e4m3 (interpreted; on a GPU tests/ops/device/test_e4m3.py decodes its way)."""
    monkeypatch.setattr(hardware, "INTERPRETED_AS", "sm_80")
    inputs = index_inputs([65, 3, 70, 0], rows_per_request=rows, heads=heads, seed=7)
    got = [check_logits(inputs, implementation) for implementation in SCORING]
    assert torch.equal(*got)


def test_a_row_alone_equals_the_row_in_a_batch_with_nan_in_the_others() -> None:
    inputs = index_inputs([130, 64, 200, 7], seed=8)
    together = check_logits(inputs, "triton")
    inputs.cache[inputs.page_table[[0, 3], :4].long().flatten()[[0, 1, 2, 4]]] = 0xFF
    inputs.q.view(torch.uint8)[[0, 3]] = 0x7F
    inputs.weights[[0, 3]] = NAN
    poisoned = check_logits(inputs, "triton")
    assert poisoned[0, :130].isnan().all()
    for row in (1, 2):
        assert torch.equal(poisoned[row], together[row])
        only = slice(row, row + 1)
        alone = IndexInputs(
            inputs.q[only], inputs.cache, inputs.weights[only], inputs.lengths[only], inputs.page_table[only], None
        )
        assert torch.equal(check_logits(alone, "triton")[0], together[row])


def test_scores_of_nan_inf_and_negative_weights_are_those_of_the_reference() -> None:
    inputs = index_inputs([70, 70, 70, 65], heads=4, seed=9)
    inputs.q.view(torch.uint8)[0, 2, 5] = 0xFF  # relu(NaN) is NaN
    inputs.weights[1] = -inputs.weights[1].abs()
    inputs.weights[2, 1] = NAN
    got = check_logits(inputs, "triton")
    assert got[0, :70].isnan().all() and got[2, :70].isnan().all() and (got[1, :70] <= 0).all()


@pytest.mark.parametrize("implementation", SCORING)
@pytest.mark.parametrize(("heads", "width"), [(4, 128), (16, 64), (12, 96)])
def test_ragged_prefill_scores_each_row_between_its_own_bounds(heads: int, width: int, implementation: str) -> None:
    """Bounds that meet, nest, are empty, reversed, or reach outside; an odd number of rows, so that the last run is short."""
    bounds = [
        (0, 50), (10, 11), (200, 200), (3, 2), (0, 0), (199, 200), (-7, 70), (64, 128), (150, 10**6),
        (300, 400), (-9, -3), (0, 200), (63, 65),
    ]  # fmt: skip
    g = seeded(10)
    starts, ends = torch.tensor(bounds).T  # int64, every second element
    q = (randn(g, 13, heads, width) * 30).to(torch.float8_e4m3fn)
    keys = (randn(g, 200, width) * 30).to(torch.float8_e4m3fn)
    scales, weights = torch.rand(200, generator=g) + 0.01, randn(g, 13, heads)
    args = [tensor.to(DEVICE) for tensor in (q, keys, scales, weights, starts, ends)]
    got, want = (torch.full((13, 205), UNTOUCHED, device=DEVICE)[:, 2:202] for _ in range(2))
    assert mqa_logits_ragged(*args, got, implementation=implementation) is got
    mqa_logits_ragged(*args, want, implementation="reference")
    check_scores(got, want, tolerance(implementation))
    narrow = [tensor.int() if tensor.dtype == torch.int64 else tensor for tensor in args]
    again = mqa_logits_ragged(*narrow, torch.full((13, 200), UNTOUCHED, device=DEVICE), implementation=implementation)
    assert torch.equal(again, got)


def test_ragged_prefill_of_no_rows_or_no_keys_writes_nothing() -> None:
    q = torch.zeros(3, 4, 128, device=DEVICE).to(torch.float8_e4m3fn)
    none, some = torch.zeros(3, dtype=torch.int32, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    keys = torch.zeros(0, 128, device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.zeros(0, device=DEVICE)
    assert mqa_logits_ragged(q, keys, scales, some, none, none, implementation="triton").shape == (3, 0)
    args = (q[:0], torch.zeros_like(q[0]), torch.ones(4, device=DEVICE), some[:0], none[:0], none[:0])
    assert mqa_logits_ragged(*args, implementation="triton").shape == (0, 4)
    inputs = moved(index_inputs([3])).arguments()
    rows = {name: inputs[name][:0] for name in ("q", "weights", "lengths")} | {"row_to_request": none[:0]}
    assert mqa_logits(**(inputs | rows), implementation="triton").shape[0] == 0


def unaligned(cache: torch.Tensor) -> torch.Tensor:
    return torch.zeros(cache.numel() + 1, dtype=torch.uint8)[1:].view(cache.shape).copy_(cache)


def odd_stride(cache: torch.Tensor) -> torch.Tensor:
    stride = cache.stride(0) + 2
    view = torch.zeros(cache.shape[0] * stride, dtype=torch.uint8)
    return view.as_strided(cache.shape, (stride, *cache.stride()[1:])).copy_(cache)


REFUSED = {
    "float32 keys": ({"layout": "exact"}, {}, "an exact cache, they read index_fp8"),
    "65 heads": ({"heads": 65}, {}, "65 heads, they take 64 at most"),
    "unaligned pages": ({}, {"cache": unaligned}, "the fp32 scales are not aligned"),
    "pages at an odd stride": ({}, {"cache": odd_stride}, "8450 bytes apart"),
    "q apart": ({}, {"q": lambda q: torch.stack([q, q], -1)[..., 0]}, "q of stride 2"),
    "a table apart": ({}, {"page_table": lambda table: torch.stack([table] * 2, -1)[..., 0]}, "table of stride 2"),
}


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.usefixtures("kernels_preferred")
def test_what_the_kernels_do_not_take_runs_by_the_reference_and_says_why(refused: str) -> None:
    kinds, changes, reason = REFUSED[refused]
    inputs = index_inputs([70, 3], seed=11, **kinds)
    want = mqa_logits(**inputs.arguments(), implementation="reference")
    for name, change in changes.items():
        setattr(inputs, name, change(getattr(inputs, name)))
    there = inputs if DEVICE.type == "cpu" else moved(inputs)
    out = torch.full(want.shape, UNTOUCHED, device=DEVICE)
    arguments = (*there.arguments().values(), out, False)
    chosen, why = dispatch.resolve("mqa_logits", DEVICE, None, arguments)
    assert chosen.name == "reference" and reason in why
    got = mqa_logits(**there.arguments(), out=out).cpu()
    for row, length in enumerate(inputs.lengths.tolist()):
        assert torch.equal(got[row, :length], want[row, :length])
    with pytest.raises(UserError, match=reason):
        mqa_logits(**there.arguments(), implementation="triton")


@pytest.mark.usefixtures("kernels_preferred")
def test_results_apart_and_float32_keys_of_ragged_prefill_are_refused_too() -> None:
    inputs = moved(index_inputs([70, 3]))
    width = 64 * inputs.page_table.shape[1]
    apart = torch.zeros(2, width, 2, device=DEVICE)[..., 0]
    with pytest.raises(UserError, match="out of stride 2"):
        mqa_logits(**inputs.arguments(), out=apart, implementation="triton")
    g = seeded(12)
    q, keys, weights = (randn(g, *shape).to(DEVICE) for shape in ((2, 4, 128), (9, 128), (2, 4)))
    bounds = torch.tensor([0, 3]).to(DEVICE), torch.tensor([9, 4]).to(DEVICE)
    with pytest.raises(UserError, match="float32 keys, they read e4m3"):
        mqa_logits_ragged(q, keys, None, weights, *bounds, implementation="triton")
    assert torch.equal(
        mqa_logits_ragged(q, keys, None, weights, *bounds)[0],
        mqa_logits_ragged(q, keys, None, weights, *bounds, implementation="reference")[0],
    )


@pytest.mark.usefixtures("kernels_preferred")
def test_what_the_kernels_take_runs_by_them() -> None:
    inputs = moved(index_inputs([3]))
    arguments = (*inputs.arguments().values(), torch.zeros(1, 128, device=DEVICE), False)
    assert dispatch.resolve("mqa_logits", DEVICE, None, arguments)[0].name == "triton"


def broken(what: str) -> IndexInputs:
    inputs = index_inputs([70, 130, 60], seed=13)
    inputs.row_to_request = torch.tensor([0, 1, 2])
    if what == "row_to_request":
        inputs.row_to_request[2] = 3
    elif what == "lengths":
        inputs.lengths[1] = 64 * inputs.page_table.shape[1] + 1
    else:
        inputs.page_table[1, 2] = inputs.cache.shape[0]  # the last live page
    return inputs


@pytest.mark.parametrize("what", ["row_to_request", "lengths", "page_table"])
def test_debug_mode_raises_what_the_reference_raises(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = broken(what)
    check_logits(inputs, "triton")
    monkeypatch.setenv("THALWEG_CHECK", "1")
    said = []
    for implementation in ("reference", "triton", "triton_f16"):
        with pytest.raises(IndexError, match=what) as caught:
            mqa_logits(**moved(inputs).arguments(), implementation=implementation)
        said.append(str(caught.value).rpartition("the first is")[2])
    assert len(set(said)) == 1


def test_debug_mode_looks_at_the_live_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", "1")
    inputs = with_rows(index_inputs([70, 130], seed=14), [0, 1, 1, 9, 1], [70, 2, 130, 0, -1])
    inputs.page_table[0, 1] = -1  # no page, and no error
    check_logits(inputs, "triton")


def test_debug_mode_raises_for_ragged_bounds_outside_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    g = seeded(15)
    keys = torch.zeros(10, 128).to(torch.float8_e4m3fn).to(DEVICE)
    q, weights, scales = keys[:8].view(2, 4, 128), randn(g, 2, 4).to(DEVICE), torch.ones(10, device=DEVICE)

    def score(starts: list[int], ends: list[int], keys: torch.Tensor = keys) -> None:
        bounds = torch.tensor([starts, ends]).to(DEVICE)
        mqa_logits_ragged(q, keys, scales[: len(keys)], weights, *bounds, implementation="triton")

    score([-7, 4], [5, 99])
    monkeypatch.setenv("THALWEG_CHECK", "1")
    score([0, 4], [10, 4])
    for name, starts, ends in (("starts", [-7, 0], [5, 1]), ("ends", [0, 4], [5, 99])):
        with pytest.raises(IndexError, match=name):
            score(starts, ends)
    with pytest.raises(IndexError, match="starts"):
        score([0, 0], [1, 0], keys[:0])
