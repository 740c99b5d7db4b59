"""The kernels of topk select what a stable sort selects, at every size where they change their way, and their pieces too."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.interpreter import watching
from tests.ops.builders import NAN, randn, seeded
from tests.ops.index_kernels import DEVICE, in_order, interpreted
from tests.ops.test_topk import VALUES, by_sorting, scored
from thalweg.errors import UserError
from thalweg.ops import dispatch, topk
from thalweg.ops.topk.scratch import CAPACITY, DENSE, ROWS_AT_ONCE
from thalweg.ops.topk.select import best, load_keys
from thalweg.ops.topk.triton import LARGE, MOST

pytestmark = [
    pytest.mark.usefixtures("few_programs", "spoiled_scratch"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),  # numpy's, interpreted
]

N = 256
MAX = 3.4028234663852886e38
TINY = 1.401298464324817e-45


@triton.jit
def choose(scores, kept_at, place_at, found_at, n, k, slack, N: tl.constexpr):
    """`best` of scores [n]: what it keeps [N], the places [N], (how many, the low key)."""
    index = tl.arange(0, N)
    key = load_keys(scores, index, index < n, True)
    keep, place, kept, low = best(key, k, slack, N)
    tl.store(kept_at + index, keep.to(tl.int32))
    tl.store(place_at + index, place)
    tl.store(found_at, kept)
    tl.store(found_at + 1, tl.sum((key >= low).to(tl.int32), 0))


@triton.jit
def make_keys(scores, keys, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(keys + index, load_keys(scores, index, index < N, True).to(tl.int64))


def keys_of(scores: torch.Tensor) -> list[int]:
    """The keys of N scores, as integers from 0 to 2^32 - 1."""
    keys = torch.empty(N, dtype=torch.int64, device=DEVICE)
    make_keys[(1,)](scores.to(DEVICE), keys, N, enable_fp_fusion=True)
    return keys.tolist()


def ranking(scores: list[float]) -> list[int]:
    """Indices from the highest score to the lowest, NaN first, equal ones by the lower index."""
    return sorted(
        range(len(scores)), key=lambda i: (not math.isnan(scores[i]), 0 if math.isnan(scores[i]) else -scores[i], i)
    )


def check_best(scores: torch.Tensor, k: int, slack: int = 0) -> None:
    n = len(scores)
    padded = torch.nn.functional.pad(scores, (0, N - n), value=NAN).to(DEVICE)
    keep, place = torch.empty(2, N, dtype=torch.int32, device=DEVICE)
    found = torch.empty(2, dtype=torch.int32, device=DEVICE)
    choose[(1,)](padded, keep, place, found, n, k, slack, N, enable_fp_fusion=True)
    kept = keep.nonzero().squeeze(1).tolist()
    order = ranking(scores.tolist())
    assert int(found[0]) == len(kept) and place.cpu()[kept].tolist() == list(range(len(kept)))
    assert min(k, n) <= len(kept) <= min(k + slack, n)
    assert set(kept) == set(order[: len(kept)])
    assert int(found[1]) >= len(kept)  # all that are kept reach the low key


def test_keys_have_the_order_of_scores_and_leave_both_ends_free() -> None:
    """Key 0 is no entry; above the highest key a search needs room, whatever bits a NaN has."""
    rising = [-math.inf, -MAX, -1.0000001192092896, -1.0, -1.2e-38, -TINY, 0.0, TINY, 1.2e-38, 1.0, MAX, math.inf]
    keys = keys_of(torch.tensor(rising + [0.0] * (N - len(rising))))
    assert keys[: len(rising)] == sorted(set(keys))
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -(2**22), -(2**23) + 1], dtype=torch.int32)
    specials = torch.cat([nans.view(torch.float32), torch.tensor([-0.0, 0.0, math.inf]), torch.zeros(N - 9)])
    keys_of_nans = keys_of(specials)
    assert len(set(keys_of_nans[:6])) == 1 and keys_of_nans[8] < keys_of_nans[0] < 2**32 - 1
    assert keys_of_nans[6] == keys_of_nans[7] and keys[0] > 0


HIGHEST_NAN = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32).item()
SHAPES = {
    "normal": lambda g: randn(g, N),
    "two clusters": lambda g: torch.where(torch.rand(N, generator=g) < 0.5, 1e6, -1e6) + randn(g, N),
    "one far away": lambda g: torch.cat([randn(g, N - 1), torch.tensor([MAX])]),
    "far away on both sides": lambda g: torch.cat([torch.tensor([-MAX, MAX]), randn(g, N - 2) * 1e-30]),
    "every magnitude": lambda g: torch.logspace(-44, 38, N)[torch.randperm(N, generator=g)],
    "every magnitude and sign": lambda g: torch.logspace(-44, 38, N) * randn(g, N).sign(),
    "denormals": lambda g: torch.randint(-9, 9, (N,), generator=g) * TINY,
    "one bit apart": lambda g: (torch.randint(0, 40, (N,), generator=g).int() + 0x3F800000).view(torch.float32),
    "zeros of both signs": lambda g: torch.where(torch.rand(N, generator=g) < 0.5, 0.0, -0.0),
    "all equal": lambda g: torch.full((N,), -3.5),
    "all NaN": lambda g: torch.full((N,), NAN),
    "some NaN": lambda g: torch.where(torch.rand(N, generator=g) < 0.02, HIGHEST_NAN, randn(g, N)),
    "+inf beside finite": lambda g: torch.where(torch.rand(N, generator=g) < 0.1, math.inf, randn(g, N)),
    "-inf beside finite": lambda g: torch.where(torch.rand(N, generator=g) < 0.7, -math.inf, randn(g, N)),
    "both infinities": lambda g: torch.where(torch.rand(N, generator=g) < 0.5, math.inf, -math.inf),
    "few values": lambda g: torch.randint(0, 3, (N,), generator=g).float(),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_are_found_whatever_the_scores_look_like(shape: str) -> None:
    scores = SHAPES[shape](seeded(1))
    for k, slack in ((2, 0), (7, 3), (100, 0), (128, 16), (255, 0)):
        check_best(scores, k, slack)
    check_best(scores[:200], 199)
    check_best(scores[:100], 100)
    check_best(scores[:50], 60, 7)
    check_best(scores[:0], 3)


def check(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """As the reference, which is a stable sort: the same indices, rising, the rest -1; returns them."""
    got = topk(logits.to(DEVICE), lengths.to(DEVICE), k, deterministic=True, implementation="triton").cpu()
    want = topk(logits, lengths, k, deterministic=True, implementation="reference")
    assert torch.equal(in_order(got), in_order(want))
    for row in got.tolist():
        found = [index for index in row if index != -1]
        assert row == sorted(found) + [-1] * (k - len(found))
    return got


def poisoned(lengths: list[int], width: int, seed: int) -> torch.Tensor:
    """Random scores of one digit (many ties), the highest NaN past each length."""
    logits = torch.full((len(lengths), width), HIGHEST_NAN)
    g = seeded(seed)
    for row, length in enumerate(max(length, 0) for length in lengths):
        logits[row, :length] = randn(g, length) if row % 2 else torch.randint(-9, 9, (length,), generator=g) / 4
    return logits


@pytest.mark.parametrize("k", [1, 37, 2047])
def test_rows_of_up_to_a_load_of_candidates(k: int) -> None:
    lengths = [0, 1, 36, 37, 38, 2047, 2049, CAPACITY - 1, CAPACITY]
    check(poisoned(lengths, CAPACITY, k), torch.tensor(lengths), k)


@pytest.mark.parametrize("k", [37, 512, 513, 2048])
def test_rows_of_up_to_a_level_of_groups(k: int) -> None:
    lengths = [5, CAPACITY, CAPACITY + 1, 8200 + k, DENSE]
    check(poisoned(lengths, DENSE, k), torch.tensor(lengths), k)


@pytest.mark.parametrize("k", [37, 2048])
def test_longer_rows_have_groups_of_groups(k: int) -> None:
    lengths = [DENSE + 1, DENSE + 9]
    check(poisoned(lengths, DENSE + 9, k), torch.tensor(lengths), k)


def test_the_longest_rows_have_larger_groups() -> None:
    width = LARGE[0] * DENSE + 70
    lengths = [width - 1, DENSE + 5, 100]
    check(poisoned(lengths, width, 1), torch.tensor(lengths), 64)


@pytest.mark.usefixtures("small_selection")
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.integers(-1, 70), st.integers(0, 520), st.integers(500, 4200)), min_size=1, max_size=2),
    st.sampled_from([2, 7, 8, 9, 37, 38]),
    st.sampled_from(["values", "normal", "rising", "falling", "blocks", "rare"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_selection_equals_a_sort_at_every_level(lengths: list[int], k: int, kind: str, wide: bool, seed: int) -> None:
    g = seeded(seed)
    width = max(*lengths, 1) + (4500 if wide else 3)  # wider than 8 x 512: groups of 32
    shape = (len(lengths), width)
    logits = {
        "values": lambda: torch.tensor(VALUES)[torch.randint(len(VALUES), shape, generator=g)],
        "normal": lambda: randn(g, *shape),
        "rising": lambda: torch.arange(width).float().expand(shape).clone(),
        "falling": lambda: -torch.arange(width).float().expand(shape).clone(),
        "blocks": lambda: torch.randint(4, (shape[0], -(-width // 50)), generator=g).float().repeat_interleave(50, 1),
        "rare": lambda: (torch.rand(shape, generator=g) < 0.02).float(),
    }[kind]()[:, :width]
    for row, length in enumerate(lengths):
        logits[row, max(length, 0) :] = [NAN, math.inf][seed % 2]
    check(logits, torch.tensor(lengths), k)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.sampled_from([*VALUES, NAN]), min_size=12, max_size=12), min_size=1, max_size=3),
    st.integers(1, 15),
    st.integers(-1, 12),
)
def test_ordered_indices_fall_with_their_scores(rows: list[list[float]], k: int, length: int) -> None:
    logits, lengths = torch.tensor(rows), torch.tensor([length] + [12] * (len(rows) - 1))
    got = topk(logits.to(DEVICE), lengths.to(DEVICE), k, ordered=True, deterministic=True, implementation="triton")
    assert torch.equal(got.cpu(), topk(logits, lengths, k, ordered=True, implementation="reference"))


def test_a_hundred_ones_among_8220_zeros_and_rows_with_infinity() -> None:
    """Field case 3: L = 8320, k = 2048, 924 slots left -1; all equal; rows with +inf."""
    logits = torch.cat([scored(100, 8320, 1), torch.full((1, 8320), 0.25), randn(seeded(2), 1, 8320)])
    logits[2, ::100] = math.inf
    chosen = check(logits, torch.tensor([8320] * 3), 2048)
    assert chosen[0].tolist() == sorted(by_sorting(logits[0].tolist(), 2048))
    assert chosen[1].tolist() == list(range(2048))
    assert set(range(0, 8320, 100)) <= set(chosen[2].tolist())


def test_scores_of_nan_cost_no_place_and_end_no_search() -> None:
    """Fewer NaN than k, of the bits that a GPU gives it, in rows of every way to select."""
    logits = randn(seeded(3), 3, 9000)
    logits[:, 50:60] = HIGHEST_NAN
    chosen = check(logits, torch.tensor([300, 9000, 55]), 37)
    assert all(set(range(50, 55)) <= set(row) for row in chosen.tolist())


@pytest.mark.parametrize("batch", [8, 33])
def test_all_lengths_zero_give_minus_one_everywhere(batch: int) -> None:
    """Field case 2; what earlier calls left in the scratch is there."""
    logits = torch.full((batch, CAPACITY + 1), NAN)
    assert (check(logits, torch.tensor([0, -4] * batch)[:batch], 16) == -1).all()


@pytest.mark.parametrize("width", [600, 4200])  # wider than 8 x 512: groups of 32
@pytest.mark.usefixtures("small_selection")
def test_the_best_may_be_the_last_of_a_row(width: int) -> None:
    lengths = [65, 71, 513, 519, width - 1]
    rising = torch.arange(width).float().repeat(len(lengths), 1)
    for row, length in enumerate(lengths):
        rising[row, length:] = HIGHEST_NAN
    assert check(rising, torch.tensor(lengths), 9)[:, 8].tolist() == [length - 1 for length in lengths]


@pytest.mark.usefixtures("small_selection")
def test_what_a_full_list_leaves_out_are_its_own_scores_and_none_one_bit_above() -> None:
    """More candidates than the list holds, of neighbouring scores: first the lower of two, then the higher."""
    bits = torch.tensor([0] * 200 + [1] * 200 + [3] * 20 + [2] * 20).int() + 0x3F800000
    logits = torch.stack([bits, bits.flip(0)]).view(torch.float32)
    for k in (9, 30, 38):
        check(logits, torch.tensor([440, 440]), k)


@interpreted
@pytest.mark.usefixtures("small_selection")
def test_each_place_is_written_once_and_nothing_beside_the_scores_is_read(spoiled_scratch: list[torch.Tensor]) -> None:
    """Rows of every way to select, each within its own length and the last at the end of its memory."""
    lengths = torch.tensor([4500, 0, 63, 600])
    logits = randn(seeded(6), 4, 4500)
    live = [logits[row, :length] for row, length in enumerate(lengths.tolist())]
    with watching() as accesses:
        chosen = topk(logits, lengths, 20, implementation="triton")
    assert accesses.outside(*live, lengths, chosen, *spoiled_scratch) == 0
    assert accesses.stored_twice(chosen) == 0


@pytest.mark.usefixtures("small_selection")
def test_more_rows_than_a_launch_takes() -> None:
    lengths = [(97 * row) % 700 for row in range(10)]  # launches of 8 rows here
    check(poisoned(lengths, 700, 4), torch.tensor(lengths), 20)


def test_logits_may_be_a_view_and_lengths_parts_of_something() -> None:
    buffer = torch.full((3, 6000), HIGHEST_NAN, device=DEVICE)
    view = buffer[:, 3:5003]
    lengths = torch.tensor([[5000, 7], [10**12, 7], [4100, 7]], device=DEVICE)[:, 0]
    view.copy_(randn(seeded(5), 3, 5000))
    got = topk(view, lengths, 30, deterministic=True, implementation="triton")
    want = topk(view, lengths.clamp(max=5000), 30, implementation="reference")
    assert torch.equal(in_order(got), in_order(want))
    assert topk(view[:0], lengths[:0], 3, implementation="triton").shape == (0, 3)
    for ordered in (False, True):
        none = topk(view[:, :0], lengths * 0, 3, ordered=ordered, implementation="triton")
        assert none.tolist() == [[-1] * 3] * 3


@pytest.mark.usefixtures("kernels_preferred")
def test_what_the_kernels_do_not_take_runs_by_the_reference_and_says_why() -> None:
    logits, lengths = torch.rand(2, 10, 2, device=DEVICE), torch.tensor([10, 3], device=DEVICE)
    wide = torch.empty(1, LARGE[-1] * DENSE + 1, device=DEVICE)
    for scores, k, reason in (
        (logits[..., 0], 3, "logits of stride 2 along a row"),
        (logits[..., 0].contiguous(), MOST + 1, "k = 2049, they hold 2048 at most"),
        (wide, 3, "rows of 1048577, they hold 1048576 at most"),
    ):
        counts = lengths[: len(scores)]
        chosen, why = dispatch.resolve("topk", DEVICE, None, (scores, counts, k, False, False))
        assert chosen.name == "reference" and reason in why
        assert torch.equal(topk(scores, counts, k), topk(scores, counts, k, implementation="reference"))
        with pytest.raises(UserError, match=reason):
            topk(scores, counts, k, implementation="triton")
    arguments = (logits[..., 0].contiguous(), lengths, MOST, False, False)
    assert dispatch.resolve("topk", DEVICE, None, arguments)[0].name == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 512, 2048])
@pytest.mark.parametrize(
    "length", [8320, 96_000, 100_000, 194_856, 194_857, 262_143, 262_144, 262_145, 524_288, 1_048_575, 1_048_576]
)
def test_rows_of_every_length_on_a_gpu(length: int, k: int) -> None:
    """Field case 4: 384K, 400K, 779,424 tokens and more at ratio 4, and rows as long as kernels take."""
    lengths = [length, length - 1, 1000, length // 2 + 1]
    check(poisoned(lengths, length, k), torch.tensor(lengths), k)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8192, 65_536, 262_144, 1_048_576])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_every_kind_of_score_on_a_gpu(shape: str, width: int) -> None:
    g = seeded(6)
    row = torch.cat([SHAPES[shape](g) for _ in range(width // N)])
    check(torch.stack([row, row.flip(0)]), torch.tensor([width, width - 3]), 512)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 255, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 700])
def test_any_number_of_rows_on_a_gpu(rows: int) -> None:
    lengths = [(7919 * row) % 40_000 for row in range(rows)]
    check(poisoned(lengths, 40_000, rows), torch.tensor(lengths), 512)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [8, 32, 33, 64, 250, 256, 1024])
def test_all_lengths_zero_give_minus_one_everywhere_on_a_gpu(batch: int) -> None:
    """Field case 2: B % 32 == 0."""
    logits = torch.full((batch, 70_000), NAN)
    assert (check(logits, torch.zeros(batch, dtype=torch.int32), 2048) == -1).all()


@pytest.mark.gpu
def test_a_row_alone_equals_the_row_in_a_batch_of_64_on_a_gpu() -> None:
    lengths = [(1237 * row) % 90_000 + 1 for row in range(64)]
    logits = poisoned(lengths, 90_000, 7).to(DEVICE)
    counts = torch.tensor(lengths, device=DEVICE)
    together = topk(logits, counts, 512, deterministic=True, implementation="triton")
    for row in (0, 1, 31, 63):
        only = slice(row, row + 1)
        alone = topk(logits[only], counts[only], 512, deterministic=True, implementation="triton")
        assert torch.equal(alone[0], together[row])


@pytest.mark.gpu
def test_a_captured_graph_selects_for_other_lengths_and_scores() -> None:
    """Field case 9: captured with 8 rows; eager calls of more rows between replays leave its scratch alone."""
    logits = torch.empty(8, 262_144, device=DEVICE)
    lengths = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    logits.copy_(poisoned([100] * 8, 262_144, 8))
    topk(logits, lengths, 512, deterministic=True, implementation="triton")  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = topk(logits, lengths, 512, deterministic=True, implementation="triton")
    for seed, some in enumerate(([100] * 8, [1, 5, 513, 4097, 33_000, 100_000, 0, 0], [262_144] * 6 + [0, -1])):
        logits.copy_(poisoned(some, 262_144, seed))
        lengths.copy_(torch.tensor(some))
        graph.replay()
        assert torch.equal(in_order(captured), in_order(topk(logits, lengths, 512, implementation="reference")))
        check(poisoned([9000] * 40, 9000, seed), torch.tensor([9000] * 40), 512)
