"""The kernels of index_topk choose what mqa_logits and topk choose, also where a row's scores do not fit the scratch."""

import pytest
import torch

from tests.interpreter import watching
from tests.ops.builders import NAN
from tests.ops.index_inputs import IndexInputs, index_inputs
from tests.ops.index_kernels import (
    DEVICE,
    SCORING,
    guarded,
    in_order,
    interpreted,
    moved,
)
from tests.ops.test_index_topk import check_rows
from tests.ops.test_mqa_logits_kernels import REFUSED, broken, with_rows
from thalweg.errors import UserError
from thalweg.layouts import index_fp8
from thalweg.ops import dispatch, index_topk, mqa_logits, topk
from thalweg.ops.topk.scratch import DENSE

pytestmark = [
    pytest.mark.usefixtures("few_programs", "spoiled_scratch"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),  # numpy's, interpreted
]


def choose(inputs: IndexInputs, k: int, implementation: str, page_slots: int | None = None) -> tuple[torch.Tensor, ...]:
    """(indices, slots) of inputs that lie on the device of the kernels, found in scratch full of rubbish."""
    return index_topk(
        **inputs.arguments(), k=k, page_slots=page_slots, deterministic=True, implementation=implementation
    )


def separately(inputs: IndexInputs, k: int, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, indices) by mqa_logits and topk."""
    logits = mqa_logits(**inputs.arguments(), clean=True, implementation=implementation)
    clipped = inputs.lengths.clamp(max=logits.shape[1])
    return logits, topk(logits, clipped, k, deterministic=True, implementation="triton")


def check_slots(inputs: IndexInputs, indices: torch.Tensor, slots: torch.Tensor, page_slots: int) -> None:
    """The slots that the page table gives, -1 where the page is none; both rise to the -1 behind them."""
    page_keys, pool = inputs.cache.shape[1], inputs.cache.shape[0]
    owner = inputs.row_to_request
    table = inputs.page_table if owner is None else inputs.page_table[owner.clamp(0, len(inputs.page_table) - 1).long()]
    entry = indices.clamp(min=0).long()
    page = table.gather(1, entry // page_keys).long()
    known = (indices >= 0) & (page >= 0) & (page < pool)
    assert torch.equal(slots.long(), torch.where(known, page * page_slots + entry % page_keys, -1))
    assert (indices[:, 1:] > indices[:, :-1]).logical_or(indices[:, 1:] == -1).all()


def check(inputs: IndexInputs, k: int, implementation: str, page_slots: int | None = None) -> torch.Tensor:
    """Equal to mqa_logits and topk of the same implementation; returns the indices, on the CPU."""
    there = moved(inputs)
    indices, slots = choose(there, k, implementation, page_slots)
    _, want = separately(there, k, implementation)
    live = torch.ones_like(inputs.lengths, dtype=torch.bool, device=DEVICE)
    if there.row_to_request is not None:
        live = (there.row_to_request >= 0) & (there.row_to_request < len(inputs.page_table))
    assert torch.equal(in_order(indices), in_order(torch.where(live.unsqueeze(1), want, -1)))
    check_slots(there, indices, slots, page_slots or inputs.cache.shape[1])
    return indices.cpu()


@pytest.mark.parametrize(
    ("page_keys", "heads", "rows", "implementation"),
    [
        (1, 4, 1, "triton"),
        (61, 12, 2, "triton"),
        (64, 64, 4, "triton"),
        (16, 8, 1, "triton_f16"),
        (64, 16, 2, "triton_f16"),
    ],
)
def test_chooses_what_the_separate_operations_choose(
    page_keys: int, heads: int, rows: int, implementation: str
) -> None:
    inputs = index_inputs([0, 1, 15, 130, 64, 63, -2, 65], rows_per_request=rows, page_keys=page_keys, heads=heads)
    check(inputs, 16, implementation, page_keys + 3)


def test_requests_with_uneven_numbers_of_rows_and_rows_of_none() -> None:
    owners = [0, 0, 0, 0, 0, -1, 2, 2, 1, 9]
    inputs = with_rows(index_inputs([150, 70, 131], heads=4), owners, [150, 7, 64, 0, 65, 70, 131, 3, 70, 5])
    indices = check(inputs, 12, "triton")
    assert (indices[[5, 9]] == -1).all() and (indices[[0, 2, 4, 6, 8]] >= 0).all()


def test_short_contexts_beside_a_long_one() -> None:
    """Field case 5: k = 512, 0 to 513 entries mixed with more than a load of candidates; also against the formula."""
    inputs = index_inputs([0, 1, 511, 512, 513, 4300], seed=4, heads=2)
    indices, slots = (each.cpu() for each in choose(moved(inputs), 512, "triton"))
    check_rows(inputs, indices, slots, 512, 64)
    assert (indices != -1).sum(dim=1).tolist() == [0, 1, 511, 512, 512, 512]


def test_equal_scores_take_the_lower_index() -> None:
    """Field case 3: ties; also all of them, where every score is 0."""
    inputs = index_inputs([200, 100], heads=4)
    inputs.weights.zero_()
    assert check(inputs, 50, "triton").tolist() == [list(range(50))] * 2


@pytest.mark.parametrize(("rows", "implementation"), [(1, "triton"), (4, "triton"), (2, "triton_f16")])
@pytest.mark.usefixtures("small_selection")
def test_rows_longer_than_the_scratch_score_their_best_groups_again(rows: int, implementation: str) -> None:
    """512 keys are the scratch's here; rows around it, and with more maxima than a load of candidates."""
    inputs = index_inputs([512, 513, 520, 700][: max(rows, 2)], rows_per_request=rows, heads=4, seed=rows)
    check(inputs, 20, implementation, 70)


@pytest.mark.usefixtures("small_selection")
def test_long_rows_keep_ties_and_pages_that_are_none_in_their_order() -> None:
    inputs = index_inputs([700, 650], heads=4, page_keys=16, seed=9)
    inputs.page_table[0, 3:30] = -1
    inputs.cache = inputs.cache[:-2]
    inputs.page_table[1, 5] = inputs.cache.shape[0]
    check(inputs, 38, "triton")
    inputs.weights.zero_()
    indices = check(inputs, 38, "triton")
    assert indices.tolist() == [[*range(38)], [*range(38)]]
    inputs.page_table[:, :43] = -1  # fewer reachable entries than k: the others fill the places
    assert (check(inputs, 38, "triton") >= 0).all()


@pytest.mark.usefixtures("small_selection")
def test_more_rows_than_a_launch_takes() -> None:
    """Launches of 8 rows here; requests without a map are rows of the whole batch, not of the launch."""
    lengths = [(7 * row) % 11 for row in range(11)]
    inputs = index_inputs(lengths, heads=1, page_keys=16)
    check(inputs, 4, "triton")
    mapped = with_rows(inputs, [10, 10, 10, 9, 9, 8, 8, 8, 8, 8, 0, 0], [3, 4, 2, 7, 0, 1, 1, 1, 2, 2, 0, 1])
    check(mapped, 2, "triton")


def test_a_row_past_the_scratch() -> None:
    """More than 32,768 entries: the sizes as they are."""
    inputs = index_inputs([DENSE + 1], heads=1, page_keys=64, seed=11)
    check(inputs, 512, "triton")


def test_a_score_of_nan_of_any_bits_costs_no_place_and_ends_no_search() -> None:
    """A GPU's NaN is 0x7FFFFFFF; a scale with those bits makes the interpreter's the same. Fewer of them than k."""
    inputs = index_inputs([300, 90], heads=4, seed=12)
    _, scales = index_fp8.blocks(inputs.cache)
    scales.view(torch.int32)[inputs.page_table[0, 1].long(), 3:7] = 0x7FFFFFFF
    scales.view(torch.int32)[inputs.page_table[0, 2].long(), 9] = -1
    chosen = check(inputs, 40, "triton")
    assert {67, 68, 69, 70, 137} <= set(chosen[0].tolist())


def test_a_row_alone_equals_the_row_in_a_batch_with_nan_in_the_others() -> None:
    inputs = index_inputs([300, 200, 150], heads=4, seed=5)
    together = choose(moved(inputs), 64, "triton")
    alone = IndexInputs(
        inputs.q[1:2], inputs.cache, inputs.weights[1:2], inputs.lengths[1:2], inputs.page_table[1:2], None
    )
    for one, all_of_them in zip(choose(moved(alone), 64, "triton"), together, strict=True):
        assert torch.equal(one[0], all_of_them[1])
    inputs.cache[inputs.page_table[0, :5].long()] = 0xFF
    inputs.weights[2] = NAN
    poisoned = choose(moved(inputs), 64, "triton")
    assert torch.equal(poisoned[0][1], together[0][1]) and torch.equal(poisoned[1][1], together[1][1])
    for row in (0, 2):  # NaN in a row's own scores: still 64 distinct live entries
        assert poisoned[0][row].unique().numel() == 64 and int(poisoned[0][row].min()) >= 0


def with_scores(scores: list[float], lengths: list[int]) -> IndexInputs:
    """Rows of one request whose entries have exactly these scores: the keys' scales."""
    inputs = index_inputs([len(scores)] * len(lengths), rows_per_request=len(lengths), heads=1)
    codes, scales = index_fp8.blocks(inputs.cache)
    codes[:] = torch.tensor([1.0] + [0.0] * 127).to(torch.float8_e4m3fn).view(torch.uint8)
    entry = torch.arange(len(scores))
    page = inputs.page_table[0, entry // 64].long()
    scales.view(torch.float32)[page, entry % 64, 0] = torch.tensor(scores)
    inputs.q = codes[:1, :1].expand(len(lengths), 1, 128).contiguous().view(torch.float8_e4m3fn)
    inputs.weights.fill_(1.0)
    inputs.lengths = torch.tensor(lengths, dtype=torch.int32)
    inputs.row_to_request = torch.zeros(len(lengths), dtype=torch.int32)
    return inputs


@pytest.mark.usefixtures("small_selection")
def test_a_longer_row_of_the_request_lends_a_group_no_score() -> None:
    """The best of every group but the last, of which the longer rows see scores that the first does not."""
    scores = [9.0 - entry / 16 if entry % 8 == 0 else 1.0 for entry in range(96)] + [0.5] * 5 + [50.0] * 11
    inputs = with_scores(scores, [101, 104, 112, 101])
    chosen = check(inputs, 12, "triton")
    assert chosen[0].tolist() == chosen[3].tolist() == [8 * group for group in range(12)]
    assert chosen[1].tolist() == [*(8 * group for group in range(9)), 101, 102, 103]


@pytest.mark.parametrize("length", [513, 640, 700])
@pytest.mark.usefixtures("small_selection")
def test_maxima_of_maxima_end_with_the_row(length: int) -> None:
    """The four best lie in four stretches of 64, then none; or in the last entries of the row."""
    falling = with_scores([20.0 - entry / 64 if entry % 64 == 9 else 1.0 for entry in range(length)], [length])
    assert check(falling, 4, "triton")[0].tolist() == [9, 73, 137, 201]
    rising = with_scores([1.0 + entry for entry in range(length)], [length])
    assert check(rising, 4, "triton")[0].tolist() == list(range(length - 4, length))


@interpreted
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.usefixtures("small_selection")
def test_each_place_is_written_once_and_nothing_beside_the_arguments_is_read(
    rows: int, spoiled_scratch: list[torch.Tensor]
) -> None:
    """Rows of every way to select; a second store is a race, right or not."""
    inputs = guarded(index_inputs([580, 579, 130, 3], rows_per_request=rows, heads=5, table_width=10, seed=14))
    with watching() as accesses:
        results = choose(inputs, 20, "triton")
    tensors = [tensor for tensor in inputs.arguments().values() if tensor is not None]
    assert accesses.outside(*tensors, *spoiled_scratch, *results) == 0
    assert all(accesses.stored_twice(result) == 0 for result in results)


@pytest.mark.parametrize("batch", [8, 33])
@pytest.mark.parametrize("rows", [1, 2])
def test_all_lengths_zero_give_minus_one_everywhere(batch: int, rows: int) -> None:
    """Field case 2: the page table holds ids that are in no pool, and nobody looks."""
    inputs = index_inputs([0] * batch, rows_per_request=rows if batch % 2 == 0 else 1, heads=1)
    inputs.page_table.fill_(2**31 - 1)
    for result in choose(moved(inputs), 512, "triton"):
        assert (result == -1).all()


def test_arguments_may_have_gaps_and_64_bits() -> None:
    inputs = index_inputs([130, 20, 64, 7], rows_per_request=2, heads=4, seed=13)
    want = check(inputs, 16, "triton")
    there = moved(inputs)
    there.page_table = there.page_table.long()
    for name in ("weights", "lengths", "row_to_request"):
        tensor = getattr(there, name)
        tensor = tensor.long() if tensor.dtype == torch.int32 else tensor
        setattr(there, name, torch.stack([tensor, tensor.flip(0)], -1)[..., 0])
    assert torch.equal(choose(there, 16, "triton")[0].cpu(), want)


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.usefixtures("kernels_preferred")
def test_what_the_kernels_do_not_take_runs_by_the_reference_and_says_why(refused: str) -> None:
    kinds, changes, reason = REFUSED[refused]
    inputs = moved(index_inputs([70, 3], **kinds))
    for name, change in changes.items():
        setattr(inputs, name, change(getattr(inputs, name)))
    check_refused(inputs, 8, reason)


def check_refused(inputs: IndexInputs, k: int, reason: str) -> None:
    q, cache, weights, lengths, table, owner = inputs.arguments().values()
    arguments = (q, cache, weights, lengths, table, k, owner, cache.shape[1], False)
    chosen, why = dispatch.resolve("index_topk", DEVICE, None, arguments)
    assert chosen.name == "reference" and reason in why
    with pytest.warns(RuntimeWarning, match="index_topk runs by reference: .*triton cannot"):
        got = index_topk(**inputs.arguments(), k=k)
    assert torch.equal(got[0], index_topk(**inputs.arguments(), k=k, implementation="reference")[0])
    with pytest.raises(UserError, match=reason):
        index_topk(**inputs.arguments(), k=k, implementation="triton_f16")


@pytest.mark.usefixtures("kernels_preferred")
def test_a_k_or_a_table_that_the_kernels_cannot_hold_runs_by_the_reference() -> None:
    check_refused(moved(index_inputs([70, 3])), 2049, "k = 2049, they hold 2048 at most")
    wide = index_inputs([70, 3], table_width=8 * DENSE // 64 + 1)
    check_refused(moved(wide), 8, "rows of up to 262208 entries, they hold 262144 at most")


@pytest.mark.parametrize("what", ["row_to_request", "lengths", "page_table"])
def test_debug_mode_raises_what_the_reference_raises(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_CHECK", "1")
    for implementation in ("reference", *SCORING):
        with pytest.raises(IndexError, match=what):
            index_topk(**moved(broken(what)).arguments(), k=8, implementation=implementation)


@pytest.mark.parametrize(("deterministic", "run_rows"), [(True, 1), (False, 4)])
def test_deterministic_rows_are_scored_one_by_one(
    deterministic: bool, run_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel that scores a row alone: another may round otherwise, and the batch would show in the bits."""
    from thalweg.ops.index_topk import triton as fused

    launched = []
    variant = fused.keys_variant
    monkeypatch.setattr(fused, "keys_variant", lambda choice, *rest: launched.append(choice) or variant(choice, *rest))
    inputs = moved(index_inputs([70] * 4, rows_per_request=4, heads=1))
    index_topk(**inputs.arguments(), k=8, deterministic=deterministic, implementation="triton")
    assert [choice.run_rows for choice in launched] == [run_rows]
