"""The references work in blocks of rows and entries; where a block ends shows in nothing but the memory needed."""

from collections.abc import Callable

import pytest
import torch

from tests.ops.attention_inputs import filled
from tests.ops.builders import randn, seeded
from tests.ops.index_inputs import index_inputs
from tests.ops.test_ceiling import Allocations
from tests.ops.test_compressor import Compressor, Request
from thalweg.layouts import exact
from thalweg.layouts.work import counting
from thalweg.ops import index_topk, mqa_logits, mqa_logits_ragged, sparse_mla
from thalweg.ops.compressor import reference as compressor_reference
from thalweg.ops.mqa_logits import reference as logits_reference
from thalweg.ops.sparse_mla import reference as attention_reference


def select() -> tuple[torch.Tensor, ...]:
    """A prefill chunk of 40 rows over 190 to 229 keys and one of 40 short rows; a page of the first is in no pool."""
    inputs = index_inputs([*range(190, 230), *range(-5, 35)], rows_per_request=40)
    inputs.page_table[0, 1] = -1
    return index_topk(**inputs.arguments(), k=16, deterministic=True)


def score() -> tuple[torch.Tensor, ...]:
    inputs = index_inputs([*range(190, 230), *range(-5, 35)], rows_per_request=40, layout="exact")
    return (mqa_logits(**inputs.arguments(), out=torch.zeros(80, 320)),)


def score_ragged() -> tuple[torch.Tensor, ...]:
    g = seeded(1)
    starts = torch.tensor([0] * 30 + [50] * 20)
    ends = torch.cat((torch.arange(1, 31), torch.arange(60, 80)))
    out = torch.zeros(50, 90)
    return (mqa_logits_ragged(randn(g, 50, 16, 128), randn(g, 90, 128), None, randn(g, 50, 16), starts, ends, out),)


def attend() -> tuple[torch.Tensor, ...]:
    g = seeded(2)
    cache, _ = filled(g, "v4", 3, 64)
    return sparse_mla(randn(g, 20, 4, 512), cache, torch.randint(64, 192, (20, 30), generator=g), scale=0.05)


def pool() -> tuple[torch.Tensor, ...]:
    compressor = Compressor(96, 4, exact.allocate(1, 80, 96))
    compressor.step(Request(3, 300, 96, 4, 1, 0).rows(0, 300))
    return (compressor.cache,)


@pytest.mark.parametrize(
    ("operation", "module", "name", "sizes"),
    [
        (select, logits_reference, "_BLOCK_ELEMENTS", [1, 16 * 229 * 7, 2**23]),
        (score, logits_reference, "_BLOCK_ELEMENTS", [1, 16 * 229 * 7, 2**23]),
        (score_ragged, logits_reference, "_BLOCK_ELEMENTS", [1, 16 * 30 * 7, 2**23]),
        (attend, attention_reference, "_BLOCK_ELEMENTS", [1, 30 * 512 * 7, 2**23]),
        (pool, compressor_reference, "_BLOCK", [1, 7, 64]),
    ],
)
def test_the_bits_do_not_depend_on_the_blocks(
    operation: Callable, module: object, name: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for size in sizes:
        monkeypatch.setattr(module, name, size)
        results.append(operation())
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


def test_a_prefill_chunk_needs_no_buffer_of_rows_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 rows over 2,047 keys at most: whole scores would be 3.3 MB, the keys in float64 are 2.1 MB and the largest."""
    monkeypatch.setattr(logits_reference, "_BLOCK_ELEMENTS", 2**15)
    lengths = [*range(1648, 2048)]
    inputs = index_inputs(lengths, rows_per_request=400, heads=2)
    with counting() as work, Allocations() as allocations:
        index_topk(**inputs.arguments(), k=16)
    assert max(allocations.sizes) == 2047 * 128 * 8
    assert work.keys_scored <= sum(lengths) + 400 * 8  # a block of 8 rows is scored up to its longest
    assert work.rows_read == 2047  # once for all blocks
