"""The indexer's kernels at the sizes they are for: long rows, wide tables, large pools, captured graphs."""

from collections.abc import Iterable

import pytest
import torch

from tests.ops.builders import NAN, randn, seeded
from tests.ops.index_inputs import IndexInputs, index_inputs
from tests.ops.index_kernels import (
    DEVICE,
    E4M3_ON_A_GPU,
    ON_A_GPU,
    SCORING,
    UNTOUCHED,
    check_logits,
    check_scores,
    moved,
    tolerance,
)
from tests.ops.test_index_topk_kernels import check, check_slots, choose, separately
from thalweg.layouts import index_fp8
from thalweg.ops import index_topk, mqa_logits, mqa_logits_ragged
from thalweg.ops.topk.scratch import DENSE, ROWS_AT_ONCE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("spoiled_scratch")]


def agrees(inputs: IndexInputs, k: int, implementation: str) -> None:
    """As many entries as there are up to k; what is chosen and would not be by the separate operations is as good."""
    indices, slots = choose(inputs, k, implementation)
    logits, want = separately(inputs, k, implementation)
    check_slots(inputs, indices, slots, inputs.cache.shape[1])
    assert torch.equal((indices >= 0).sum(1), inputs.lengths.clamp(0, k))
    none = torch.full((len(indices), 1), float("-inf"), device=DEVICE)
    scores = torch.cat([logits, none], 1)  # -1 is its last column
    got, best = (scores.gather(1, each.long() % scores.shape[1]).sort(1).values for each in (indices, want))
    largest = logits.where(logits.isfinite(), 0).abs().amax(1, keepdim=True)
    assert torch.equal(got.isfinite(), best.isfinite())
    assert ((got - best).abs().where(got.isfinite(), 0) <= 1e-5 * largest).all()


def large(
    lengths: list[int], rows: int = 1, heads: int = 64, width: int | None = None, pool: int = 0, seed: int = 0
) -> IndexInputs:
    """Inputs made on the device: pages shuffled over a pool, NaN in page 0 and past the table's live part nobody's id."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    requests = len(lengths) // rows
    pages = -(-max(*lengths, 1) // 64)
    pool = max(pool, requests * pages + 1)
    keys = torch.randn(pool * 64, 128, generator=g, device=DEVICE)
    cache = index_fp8.allocate(pool, device=DEVICE)
    index_fp8.write(cache, torch.arange(pool * 64, device=DEVICE), keys)
    cache[0] = 0xFF
    ids = torch.randperm(pool - 1, generator=g, device=DEVICE)[: requests * pages] + 1
    table = torch.full((requests, width or pages), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    table[:, :pages] = ids.view(requests, pages).int()
    q = (torch.randn(len(lengths), heads, 128, generator=g, device=DEVICE) * 50).to(torch.float8_e4m3fn)
    weights = torch.randn(len(lengths), heads, generator=g, device=DEVICE)
    owner = torch.arange(requests, device=DEVICE, dtype=torch.int32).repeat_interleave(rows) if rows > 1 else None
    return IndexInputs(q, cache, weights, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), table, owner)


def part(inputs: IndexInputs, rows: Iterable[int]) -> IndexInputs:
    """Only these rows, of requests of one row each."""
    chosen = torch.tensor(list(rows), device=DEVICE)
    return IndexInputs(
        inputs.q[chosen], inputs.cache, inputs.weights[chosen], inputs.lengths[chosen], inputs.page_table[chosen], None
    )


@pytest.mark.parametrize("implementation", ON_A_GPU)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("heads", [1, 8, 12, 32, 64])
def test_scores_on_a_gpu(heads: int, rows: int, implementation: str) -> None:
    inputs = large(
        [0, 1, 64, 65, 4000, 4001, 4096, 100, 10_000, 9_000, 7, 63, 128, 500, 77][: 15 - 15 % rows], rows, heads
    )
    check_logits(inputs, implementation)
    check_logits(inputs, implementation, clean=True)


@pytest.mark.parametrize("implementation", SCORING)
@pytest.mark.parametrize("page_keys", [1, 2, 16, 61, 128, 256])
def test_pages_of_any_size_on_a_gpu(page_keys: int, implementation: str) -> None:
    inputs = index_inputs([0, 1, 700, 513, 3000, 2999, 64, 63], rows_per_request=2, page_keys=page_keys, heads=64)
    check_logits(inputs, implementation)
    agrees(moved(inputs), 128, implementation)


@pytest.mark.parametrize("implementation", ON_A_GPU)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_short_rows_choose_exactly_what_the_separate_operations_choose_on_a_gpu(rows: int, implementation: str) -> None:
    """Field case 5: 0 to 513 entries mixed with 25,000 and with 32,768."""
    inputs = large([0, 0, 1, 31, 32, 511, 512, 513, 25_000, 24_999, DENSE, DENSE - 7], rows)
    for k in (1, 512, 2048):
        check(inputs, k, implementation)


@pytest.mark.parametrize("implementation", ON_A_GPU)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("length", [DENSE + 1, 96_000, 100_000, 194_856, 194_857, 262_144])
def test_long_rows_choose_as_well_as_the_separate_operations_on_a_gpu(
    length: int, rows: int, implementation: str
) -> None:
    """Field case 4: 384K, 400K, 779,424, 779,425 and 1,048,576 tokens at ratio 4."""
    inputs = large([length - row for row in range(rows)] + [1000] * rows, rows)
    for k in (1, 512, 2048):
        agrees(inputs, k, implementation)
    check_logits(inputs, implementation)


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_ceiling_that_nobody_uses_changes_no_bit_on_a_gpu(rows: int, implementation: str) -> None:
    """Field case 1: 28K tokens under tables as wide as 32,768, 262,144 and 1,048,576; no byte more is allocated."""
    results, bytes_allocated = [], []
    for tokens in (32_768, 262_144, 1_048_576):
        inputs = large([7168 - row for row in range(rows)], rows, width=tokens // 256)
        choose(inputs, 512, implementation)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results.append(torch.stack(choose(inputs, 512, implementation)))
        bytes_allocated.append(torch.cuda.max_memory_allocated() - before)
        logits = mqa_logits(**inputs.arguments(), implementation=implementation)
        results.append(logits[:, : 7168 - rows + 1].view(torch.int32))
    assert torch.equal(results[0], results[2]) and torch.equal(results[0], results[4])
    assert torch.equal(results[1], results[3]) and torch.equal(results[1], results[5])
    assert len(set(bytes_allocated)) == 1


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("batch", [8, 32, 33, 64, 250, 256])
def test_all_lengths_zero_give_minus_one_everywhere_on_a_gpu(batch: int, rows: int, implementation: str) -> None:
    """Field case 2."""
    inputs = large([0] * batch * rows, rows)
    inputs.page_table.fill_(2**31 - 1)
    for result in choose(inputs, 512, implementation):
        assert (result == -1).all()


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
@pytest.mark.parametrize("pages", [65_535, 65_536, 65_537])
def test_pools_around_two_to_the_sixteenth_page_on_a_gpu(pages: int, implementation: str) -> None:
    """Field case 4: the last page of the pool holds the best key."""
    inputs = large([5000, 64], pool=pages)
    inputs.page_table[0, 3] = pages - 1
    check_logits(inputs, implementation)
    check(inputs, 512, implementation)
    inputs.page_table[0, 3] = pages
    assert (check_logits(inputs, implementation)[0, 192:256] == -torch.inf).all()


@pytest.mark.parametrize("implementation", ON_A_GPU)
@pytest.mark.parametrize("rows", [1, 4])
def test_pages_past_two_gibibytes_give_the_bits_of_the_packed_cache_on_a_gpu(rows: int, implementation: str) -> None:
    """Field case 8: ids 1, 2142, 2143, 2200 at a page stride of 1,002,240 B, NaN between them."""
    packed, ids, stride = large([250] * rows, rows), [1, 2142, 2143, 2200], 1_002_240
    storage = torch.full((2201 * stride,), 0xFF, dtype=torch.uint8, device=DEVICE)
    far = storage.as_strided((2201, 64, 1, 132), (stride, 132, 132, 1))
    far[ids] = packed.cache[packed.page_table[0].long()]
    strided = IndexInputs(*{**vars(packed), "cache": far}.values())
    strided.page_table = torch.tensor([ids], dtype=torch.int32, device=DEVICE)
    assert torch.equal(check_logits(strided, implementation), check_logits(packed, implementation))
    assert torch.equal(check(strided, 100, implementation), check(packed, 100, implementation))


@pytest.mark.parametrize("implementation", ON_A_GPU)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch_of_64_on_a_gpu(implementation: str) -> None:
    inputs = large([(1237 * row) % 40_000 + 1 for row in range(64)])
    logits = check_logits(inputs, implementation)
    indices, slots = choose(inputs, 512, implementation)
    for row in (0, 1, 32, 63):
        alone = part(inputs, [row])
        length = int(inputs.lengths[row])
        assert torch.equal(check_logits(alone, implementation)[0, :length], logits[row, :length])
        for one, all_of_them in zip(choose(alone, 512, implementation), (indices, slots), strict=True):
            assert torch.equal(one[0], all_of_them[row])


@pytest.mark.parametrize("implementation", ON_A_GPU)
@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_a_row_alone_has_the_bits_of_the_row_among_others_of_its_request_on_a_gpu(
    rows: int, implementation: str
) -> None:
    """One row a request and several run by kernels of other shapes: their sums over heads must have one order."""
    inputs = large([20_000 - 3 * row for row in range(rows)] * 2, rows)
    inputs.page_table[1] = inputs.page_table[0]
    together = mqa_logits(**inputs.arguments(), clean=True, implementation=implementation)
    chosen = choose(inputs, 512, implementation)[0]
    for row in range(rows):
        alone = IndexInputs(
            inputs.q[row : row + 1], inputs.cache, inputs.weights[row : row + 1], inputs.lengths[row : row + 1],
            inputs.page_table[:1], None,
        )  # fmt: skip
        assert torch.equal(mqa_logits(**alone.arguments(), clean=True, implementation=implementation)[0], together[row])
        assert torch.equal(choose(alone, 512, implementation)[0][0], chosen[row])


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
def test_equal_scores_take_the_lower_index_on_a_gpu(implementation: str) -> None:
    """Field case 3, also in rows past the scratch."""
    inputs = large([8320, 100_000, 3000])
    inputs.weights.zero_()
    assert choose(inputs, 2048, implementation)[0].tolist() == [list(range(2048))] * 3


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
def test_a_score_of_nan_costs_no_place_and_ends_no_search_on_a_gpu(implementation: str) -> None:
    inputs = large([8320, 100_000, 3000], heads=16)
    _, scales = index_fp8.blocks(inputs.cache)
    scales.view(torch.float32)[inputs.page_table[:, 2].long(), 5:9] = NAN
    for row in choose(inputs, 512, implementation)[0].tolist():
        assert {133, 134, 135, 136} <= set(row) and len(set(row)) == 512


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
@pytest.mark.parametrize("rows", [ROWS_AT_ONCE - 1, ROWS_AT_ONCE + 1, 600])
def test_any_number_of_rows_on_a_gpu(rows: int, implementation: str) -> None:
    inputs = large([(97 * row) % 3000 for row in range(rows)], heads=16)
    check(inputs, 128, implementation)


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
@pytest.mark.parametrize(("rows", "batch"), [(1, 8), (2, 4), (4, 2)])
def test_a_captured_graph_takes_fewer_rows_and_other_lengths_on_a_gpu(
    rows: int, batch: int, implementation: str
) -> None:
    """Field case 9: capture 8 rows, replay 6 with padding, then 1 to 100K; eager calls between leave its scratch alone."""
    inputs = large([25_000] * 8, rows, width=100_000 // 64 + 2)
    pages = -(-100_000 // 64)
    pool = inputs.cache.shape[0] - 1
    inputs.page_table[:, :pages] = torch.arange(batch * pages, device=DEVICE).view(batch, pages).int() % pool + 1
    if inputs.row_to_request is None:
        inputs.row_to_request = torch.arange(8, dtype=torch.int32, device=DEVICE)
    out = torch.empty(8, 64 * inputs.page_table.shape[1], device=DEVICE)

    def step() -> tuple[torch.Tensor, ...]:
        mqa_logits(**inputs.arguments(), out=out, clean=True, implementation=implementation)
        return index_topk(**inputs.arguments(), k=512, deterministic=True, implementation=implementation)

    step()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, slots = step()
    owners = inputs.row_to_request.clone()
    for lengths in ([25_000] * 6, [1, 5, 513, 4097, 33_000, 100_000], [0, 64, 1, 90_000, 7, 2], [100_000] * 6):
        inputs.lengths.copy_(torch.tensor([*lengths, 0, 0]))
        inputs.row_to_request[:6], inputs.row_to_request[6:] = owners[:6], -1
        for each in (indices, slots, out):
            each.fill_(-9)
        graph.replay()
        replayed = [tensor.clone() for tensor in (out, indices, slots)]
        check(large([9000] * 40, heads=16), 64, implementation)
        eager = step()
        for got, want in zip(replayed, (out, *eager), strict=True):
            assert torch.equal(got, want)
        assert (replayed[1][6:] == -1).all() and (replayed[0][6:] == -torch.inf).all()


@pytest.mark.parametrize("implementation", E4M3_ON_A_GPU)
@pytest.mark.parametrize("rows", [256, 384, 512])
def test_verify_rows_of_any_number_on_a_gpu(rows: int, implementation: str) -> None:
    """Field case 9: 64 rows a request, a row longer than the one before."""
    inputs = large([3000 + row % 64 for row in range(rows)], 64, heads=16)
    check_logits(inputs, implementation)
    check(inputs, 128, implementation)


@pytest.mark.parametrize("implementation", ON_A_GPU)
def test_every_choice_of_kernels_runs_on_a_gpu(implementation: str) -> None:
    """Field case 15: every configuration of heads, rows and products launches, within the card's shared memory."""
    for heads in (16, 32, 64):
        for rows in (1, 2, 4):
            for mapped in (False, True):
                inputs = large([300] * 4 * rows, rows, heads)
                if rows == 1 and mapped:
                    inputs.row_to_request = torch.arange(4, dtype=torch.int32, device=DEVICE)
                agrees(inputs, 64, implementation)


def test_ragged_prefill_on_a_gpu() -> None:
    g = seeded(3)
    starts = torch.tensor([0, 0, 0, 3000, 3000, 9999, 5000, 7, 4000])
    ends = torch.tensor([1, 3000, 2999, 9000, 3000, 10_000, 4000, 9_993, 4064])
    q = (randn(g, 9, 64, 128) * 50).to(torch.float8_e4m3fn)
    keys = (randn(g, 10_000, 128) * 50).to(torch.float8_e4m3fn)
    scales, weights = torch.rand(10_000, generator=g), randn(g, 9, 64)
    args = [tensor.to(DEVICE) for tensor in (q, keys, scales, weights, starts, ends)]
    want = mqa_logits_ragged(*args, torch.full((9, 10_000), UNTOUCHED, device=DEVICE), implementation="reference")
    for implementation in SCORING:
        got = mqa_logits_ragged(*args, torch.full((9, 10_000), UNTOUCHED, device=DEVICE), implementation=implementation)
        check_scores(got, want, tolerance(implementation))
