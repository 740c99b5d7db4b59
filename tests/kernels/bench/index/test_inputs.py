import torch

from thalweg.kernels.bench.index import inputs
from thalweg.kernels.bench.index.cases import Case
from thalweg.layouts import index_fp8

CPU = torch.device("cpu")
CASE = Case(batch=3, keys=200, ceiling=8192, rows=2)


def test_sets_share_no_page_and_pages_are_permuted() -> None:
    sets = inputs.make(CASE, 4, CPU, seed=1)
    pages = torch.cat([each.page_table[:, : CASE.live_pages].flatten() for each in sets])
    assert pages.unique().numel() == 4 * 3 * 4 == pages.numel()
    assert not torch.equal(pages, pages.sort().values)
    assert int(pages.max()) < sets[0].cache.shape[0]


def test_the_table_is_as_wide_as_the_ceiling_and_scores_past_the_length_are_huge() -> None:
    (one,) = inputs.make(CASE, 1, CPU, seed=1)
    assert one.page_table.shape == (3, 8192 // 4 // 64)
    assert one.logits.shape == (6, 2048)
    assert bool((one.logits[:, CASE.keys :] == inputs.DEAD_SCORE).all())
    assert bool((one.logits[:, : CASE.keys].abs() < 100).all())
    assert one.lengths.tolist() == [200] * 6
    assert one.row_to_request is not None
    assert one.row_to_request.tolist() == [0, 0, 1, 1, 2, 2]


def test_keys_decode_to_normal_numbers_and_the_seed_decides_them() -> None:
    one, same, other = (inputs.make(CASE, 1, CPU, seed)[0] for seed in (1, 1, 2))
    keys = index_fp8.read(one.cache, torch.arange(one.cache.shape[0] * 64))
    assert abs(float(keys.std()) - 1) < 0.02
    assert torch.equal(one.cache, same.cache)
    assert torch.equal(one.q.view(torch.uint8), same.q.view(torch.uint8))
    assert not torch.equal(one.cache, other.cache)


def test_sets_are_rotated_until_they_leave_the_cache_within_reason() -> None:
    large = Case(128, 262144, 1048576)
    assert inputs.number_of_sets(large, ["mqa_logits"]) == 1
    small = Case(1, 128, 8192)
    assert inputs.number_of_sets(small, ["mqa_logits"]) == inputs.MOST_SETS
    middle = Case(16, 32768, 131072)
    assert inputs.number_of_sets(middle, ["index_topk"]) * middle.bytes_moved("index_topk") > 2 * inputs.CACHED_BYTES


def test_a_table_for_peers_has_a_line_for_every_row_or_pair_of_rows() -> None:
    (one,) = inputs.make(CASE, 1, CPU, seed=1)
    assert torch.equal(one.table_of_rows(), one.page_table[[0, 0, 1, 1, 2, 2]])
    assert torch.equal(one.table_of_rows(2), one.page_table)
