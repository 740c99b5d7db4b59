"""`mla_verify` against a dense float64 softmax over the written-out path of every node."""

import math

import pytest
import torch

from thalweg.layouts import exact, mla_bf16, v32, work
from thalweg.ops import explain, mla_verify

SCALE = 0.07
# The 7-node binary tree 0 -> (1, 2), 1 -> (3, 4), 2 -> (5, 6), numbered as a heap would pop it.
BINARY_TREE = [-1, 0, 0, 1, 1, 2, 2]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6]]


class Pool:
    """Requests whose rows lie on shuffled pages; every slot that no row was written to holds NaN, as do the gaps."""

    def __init__(self, layout: str, page_slots: int, rows: list[torch.Tensor], gap: int = 0, seed: int = 0) -> None:
        pages = [-(-max(len(r), 1) // page_slots) for r in rows]
        width = {"exact": 576, "mla_bf16": 576, "v32": 656}[layout]
        dtype = {"exact": torch.float32, "mla_bf16": torch.bfloat16, "v32": torch.uint8}[layout]
        count, stride = 1 + sum(pages), page_slots * width + gap
        storage = torch.empty(count * stride, dtype=dtype)
        storage.view(torch.uint8).fill_(0xFF)  # NaN in float32, bf16 and e4m3
        self.cache = storage.as_strided((count, page_slots, 1, width), (stride, width, width, 1))
        ids = 1 + torch.randperm(count - 1, generator=torch.Generator().manual_seed(seed))
        # Wider than any request needs; what lies past a request's pages points outside the pool.
        self.table = torch.full((len(rows), max(pages) + 3), 10**6, dtype=torch.int32)
        for request, (own, part) in enumerate(zip(rows, ids.split(pages), strict=True)):
            self.table[request, : len(part)] = part
            position = torch.arange(len(own))
            slots = part[position // page_slots] * page_slots + position % page_slots
            {"exact": exact, "mla_bf16": mla_bf16, "v32": v32}[layout].write(self.cache, slots, own)


def cached_rows(count: int, seed: int) -> torch.Tensor:
    """[count, 576] float32 that every layout stores without loss: latent on v32's grid with scale 2^-6, rope in bf16."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 576, generator=generator)
    rows[:, :512] = (rows[:, :512] * 64).to(torch.float8_e4m3fn).float() / 64
    rows[:, [0, 128, 256, 384]] = 7.0  # the amax of each group of 128: 7 / 448 = 2^-6
    rows[:, 512:] = rows[:, 512:].to(torch.bfloat16).float()
    return rows


def queries(batch: int, nodes: int, heads: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(batch, nodes, heads, 576, generator=torch.Generator().manual_seed(seed))


def attend(q: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense float64: q [H, 576] over rows [n, 576] -> (out [H, 512], lse [H])."""
    scores = q.double() @ rows.double().T * SCALE
    return torch.softmax(scores, dim=1) @ rows[:, :512].double(), torch.logsumexp(scores, dim=1)


def assert_node(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, rows: torch.Tensor, prefix: int, path: list[int]
) -> None:
    """One node's result equals dense attention over the prefix and `path`, the node numbers from the root to it."""
    expected, expected_lse = attend(q, rows[[*range(prefix), *(prefix + node for node in path)]])
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["exact", "mla_bf16", "v32"])
@pytest.mark.parametrize("page_slots", [1, 2, 16, 61, 64, 256])
def test_every_node_of_a_tree_sees_the_prefix_and_its_own_path(layout: str, page_slots: int) -> None:
    prefixes = [0, 1, 61, 128, 201, 255]
    rows = [cached_rows(prefix + 7, seed=prefix) for prefix in prefixes]
    pool = Pool(layout, page_slots, rows, gap=32)
    q = queries(len(prefixes), 7, 8)
    parents = torch.tensor([BINARY_TREE] * len(prefixes))
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor(prefixes), parents, scale=SCALE)
    for request, prefix in enumerate(prefixes):
        for node, path in enumerate(PATHS):
            assert_node(out[request, node], lse[request, node], q[request, node], rows[request], prefix, path)


@pytest.mark.parametrize("heads", [1, 8, 12])
@pytest.mark.parametrize("prefix", [125, 126, 127, 128, 129, 200, 201, 202, 203, 253, 254, 255, 256])
def test_any_head_count_at_the_prefixes_around_page_and_window_ends(heads: int, prefix: int) -> None:
    rows = cached_rows(prefix + 7, seed=prefix)
    pool = Pool("exact", 64, [rows])
    q = queries(1, 7, heads)
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([prefix]), torch.tensor([BINARY_TREE]), scale=SCALE)
    for node, path in enumerate(PATHS):
        assert_node(out[0, node], lse[0, node], q[0, node], rows, prefix, path)


@pytest.mark.parametrize("prefix", [0, 2045, 3000])
def test_prefixes_longer_than_a_block_of_keys(prefix: int) -> None:
    rows = cached_rows(prefix + 7, seed=1)
    rows[prefix // 2 : prefix // 2 + 40, :512] *= 4  # so that blocks differ in their largest score
    pool = Pool("exact", 61, [rows])
    q = queries(1, 7, 2)
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([prefix]), torch.tensor([BINARY_TREE]), scale=SCALE)
    for node, path in enumerate(PATHS):
        assert_node(out[0, node], lse[0, node], q[0, node], rows, prefix, path)


def test_a_chain_is_causal_attention() -> None:
    rows = cached_rows(30 + 1100, seed=2)
    pool = Pool("mla_bf16", 16, [rows])
    q = queries(1, 1100, 1)
    parents = (torch.arange(1100) - 1).unsqueeze(0)
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([30]), parents, scale=SCALE)
    for node in (0, 1, 2, 500, 993, 994, 995, 1023, 1024, 1099):
        assert_node(out[0, node], lse[0, node], q[0, node], rows, 30, list(range(node + 1)))


def test_the_mask_of_a_tree_gives_what_its_parents_give() -> None:
    rows = [cached_rows(40, seed=3), cached_rows(71, seed=4)]
    pool = Pool("exact", 16, rows)
    mask = torch.zeros(2, 7, 7, dtype=torch.bool)
    for node, path in enumerate(PATHS):
        mask[:, node, path] = True
    q, prefixes = queries(2, 7, 3), torch.tensor([33, 64])
    by_parents = mla_verify(q, pool.cache, pool.table, prefixes, torch.tensor([BINARY_TREE] * 2), scale=SCALE)
    by_mask = mla_verify(q, pool.cache, pool.table, prefixes, mask=mask, scale=SCALE)
    assert torch.equal(by_mask[0], by_parents[0]) and torch.equal(by_mask[1], by_parents[1])


def test_several_roots_and_unordered_siblings() -> None:
    rows = cached_rows(10 + 6, seed=5)
    pool = Pool("exact", 2, [rows])
    parents = [-1, -1, 1, 0, 2, -1]
    paths = [[0], [1], [1, 2], [0, 3], [1, 2, 4], [5]]
    q = queries(1, 6, 2)
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([10]), torch.tensor([parents]), scale=SCALE)
    for node, path in enumerate(paths):
        assert_node(out[0, node], lse[0, node], q[0, node], rows, 10, path)


def test_requests_of_different_sizes_are_padded_and_their_padding_is_never_read() -> None:
    """Node 3 of request 0 is padding in the middle; request 1 has two nodes; request 2 is empty."""
    parents = torch.tensor([[-1, 0, 0, -2, 2], [-1, 0, -2, -2, -2], [-1, 0, 1, 2, 3]])
    rows = [cached_rows(20 + 5, seed=6), cached_rows(31 + 2, seed=7), cached_rows(0, seed=8)]
    rows[0][23] = float("nan")
    pool = Pool("exact", 16, rows)
    pool.table[2] = 10**6
    q = queries(3, 5, 4)
    with work.counting() as read:
        out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([20, 31, -1]), parents, scale=SCALE)
    assert read.rows_read == 20 + 4 + 31 + 2
    assert read.entries_attended == 4 * 20 + (1 + 2 + 2 + 3) + 2 * 31 + (1 + 2)
    for node, path in [(0, [0]), (1, [0, 1]), (2, [0, 2]), (4, [0, 2, 4])]:
        assert_node(out[0, node], lse[0, node], q[0, node], rows[0], 20, path)
    for node, path in [(0, [0]), (1, [0, 1])]:
        assert_node(out[1, node], lse[1, node], q[1, node], rows[1], 31, path)
    for nothing in (out[0, 3], out[1, 2:], out[2]):
        assert torch.equal(nothing, torch.zeros_like(nothing))
    for nothing in (lse[0, 3], lse[1, 2:], lse[2]):
        assert torch.isneginf(nothing).all()


def test_what_stands_below_a_padding_node_is_padding() -> None:
    pool = Pool("exact", 16, [cached_rows(12, seed=1)])
    parents = torch.tensor([[-1, -2, 1, 2, 0]])
    out, lse = mla_verify(queries(1, 5, 1), pool.cache, pool.table, torch.tensor([5]), parents, scale=SCALE)
    assert torch.isneginf(lse[0, [1, 2, 3]]).all() and (out[0, [1, 2, 3]] == 0).all()
    assert torch.isfinite(lse[0, [0, 4]]).all()


def test_a_masked_node_is_seen_by_nobody() -> None:
    rows = cached_rows(9, seed=1)
    pool = Pool("exact", 16, [rows])
    mask = torch.tensor([[[1, 0, 0], [1, 0, 0], [1, 1, 1]]], dtype=torch.bool)
    q = queries(1, 3, 1)
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([6]), mask=mask, scale=SCALE)
    assert torch.isneginf(lse[0, 1]).all()
    assert_node(out[0, 2], lse[0, 2], q[0, 2], rows, 6, [0, 2])


def test_a_nan_reaches_only_the_nodes_that_see_it() -> None:
    rows = cached_rows(50 + 7, seed=1)
    rows[50 + 2] = float("nan")
    pool = Pool("mla_bf16", 16, [rows, cached_rows(50 + 7, seed=2)])
    parents = torch.tensor([BINARY_TREE] * 2)
    q = queries(2, 7, 4)
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([50, 50]), parents, scale=SCALE)
    for node, path in enumerate(PATHS):
        if 2 in path:
            assert out[0, node].isnan().all() and lse[0, node].isnan().all()
        else:
            assert_node(out[0, node], lse[0, node], q[0, node], rows, 50, path)
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_a_node_gives_the_same_result_alone_and_in_a_batch() -> None:
    rows = [cached_rows(prefix + 7, seed=prefix) for prefix in (90, 1500)]
    pool = Pool("v32", 64, rows)
    q, parents = queries(2, 7, 4), torch.tensor([BINARY_TREE] * 2)
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([90, 1500]), parents, scale=SCALE)
    for request, prefix in enumerate((90, 1500)):
        one = slice(request, request + 1)
        args = (q[one], pool.cache, pool.table[one], torch.tensor([prefix]), parents[one])
        alone, alone_lse = mla_verify(*args, scale=SCALE)
        torch.testing.assert_close(alone[0], out[request], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(alone_lse[0], lse[request], rtol=1e-6, atol=1e-7)


def test_the_prefix_is_read_once_whatever_the_nodes_and_the_width_of_the_table() -> None:
    rows = cached_rows(1300 + 7, seed=1)
    pool = Pool("mla_bf16", 64, [rows])
    counts = []
    for width in (pool.table.shape[1], 100_000):
        table = torch.full((1, width), 10**6, dtype=torch.int32)
        table[:, : pool.table.shape[1]] = pool.table
        with work.counting() as read:
            args = (queries(1, 7, 2), pool.cache, table, torch.tensor([1300]), torch.tensor([BINARY_TREE]))
            mla_verify(*args, scale=SCALE)
        counts.append((read.rows_read, read.pages_read))
    assert counts == [(1307, 21)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_q(dtype: torch.dtype) -> None:
    rows = cached_rows(40, seed=1)
    pool = Pool("mla_bf16", 16, [rows])
    q = queries(1, 1, 8).to(dtype)
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([39]), torch.tensor([[-1]]), scale=SCALE)
    expected, expected_lse = attend(q[0, 0].float(), rows)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out[0, 0], expected.to(dtype))
    torch.testing.assert_close(lse[0, 0].double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_a_hand_worked_softmax() -> None:
    """Scores ln 1, ln 2, ln 5 over values 8, 4, 0 in channel 0: (8 + 2 x 4 + 5 x 0) / 8 = 2, lse ln 8."""
    rows = torch.zeros(3, 576)
    rows[:, 0] = torch.tensor([8.0, 4.0, 0.0])
    rows[:, 575] = torch.tensor([1.0, 2.0, 5.0]).log() / SCALE
    pool = Pool("exact", 2, [rows])
    q = torch.zeros(1, 1, 1, 576)
    q[..., 575] = 1.0
    out, lse = mla_verify(q, pool.cache, pool.table, torch.tensor([2]), torch.tensor([[-1]]), scale=SCALE)
    assert out[0, 0, 0, 0].item() == pytest.approx(2.0, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(8), abs=1e-6)


def test_empty_batches_and_empty_trees_give_empty_results() -> None:
    pool = Pool("exact", 16, [cached_rows(20, seed=1)])
    lengths, parents = torch.tensor([5]), torch.zeros(1, 0, dtype=torch.int64)
    out, lse = mla_verify(torch.zeros(1, 0, 2, 576), pool.cache, pool.table, lengths, parents, scale=SCALE)
    assert out.shape == (1, 0, 2, 512) and lse.shape == (1, 0, 2)
    q = torch.zeros(0, 3, 2, 576)
    out, _ = mla_verify(q, pool.cache, pool.table[:0], lengths[:0], parents.new_zeros(0, 3), scale=SCALE)
    assert out.shape == (0, 3, 2, 512)


def test_a_page_outside_the_pool_is_masked_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = cached_rows(10, seed=1)
    pool = Pool("exact", 4, [rows])
    pool.table[0, 1] = 77  # positions 4 to 7
    q = queries(1, 1, 1)
    args = (q, pool.cache, pool.table, torch.tensor([9]), torch.tensor([[-1]]))
    out, lse = mla_verify(*args, scale=SCALE)
    expected, expected_lse = attend(q[0, 0], rows[[0, 1, 2, 3, 8, 9]])
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse[0, 0].double(), expected_lse, rtol=1e-6, atol=1e-6)
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(IndexError, match="the first is 77"):
        mla_verify(*args, scale=SCALE)


def test_a_position_past_the_table_is_masked_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("exact", 4, [cached_rows(4, seed=1)])
    args = (queries(1, 1, 1), pool.cache, pool.table[:, :1], torch.tensor([4]), torch.tensor([[-1]]))
    out, _ = mla_verify(*args, scale=SCALE)
    assert out.isfinite().all()
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(IndexError, match="page_table columns"):
        mla_verify(*args, scale=SCALE)


@pytest.mark.parametrize("parent", [1, 2, 5, -3])
def test_a_parent_that_is_no_earlier_node_is_padding_or_raises(parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("exact", 16, [cached_rows(12, seed=1)])
    args = (queries(1, 2, 1), pool.cache, pool.table, torch.tensor([5]), torch.tensor([[-1, parent]]))
    _, lse = mla_verify(*args, scale=SCALE)
    assert torch.isneginf(lse[0, 1]).all() and torch.isfinite(lse[0, 0]).all()
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(ValueError, match=f"parents: got \\[{parent}\\] at nodes \\[1\\]"):
        mla_verify(*args, scale=SCALE)


def test_arguments_that_do_not_fit_are_named() -> None:
    pool = Pool("exact", 16, [cached_rows(20, seed=1)])
    q, lengths, parents = torch.zeros(1, 1, 1, 576), torch.tensor([3]), torch.tensor([[-1]])
    with pytest.raises(ValueError, match="q: got shape"):
        mla_verify(q[..., :512], pool.cache, pool.table, lengths, parents, scale=SCALE)
    with pytest.raises(ValueError, match="needs one of parents and mask"):
        mla_verify(q, pool.cache, pool.table, lengths, scale=SCALE)
    with pytest.raises(ValueError, match="exact cache has rows of 512"):
        mla_verify(q, exact.allocate(2, 16, 512), pool.table, lengths, parents, scale=SCALE)
    with pytest.raises(ValueError, match="got layout v4"):
        v4_like = torch.zeros(2, 16, 1, 584, dtype=torch.uint8)
        mla_verify(q, v4_like, pool.table, lengths, parents, scale=SCALE)
    with pytest.raises(ValueError, match="parents: got shape"):
        mla_verify(q, pool.cache, pool.table, lengths, parents.expand(1, 2), scale=SCALE)
    with pytest.raises(ValueError, match="no implementation 'triton'"):
        mla_verify(q, pool.cache, pool.table, lengths, parents, scale=SCALE, implementation="triton")


def test_explain_lists_it() -> None:
    assert "mla_verify" in [choice.operation for choice in explain("cpu")]
