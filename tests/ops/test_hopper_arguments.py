"""What the kernels for Hopper do not take they name, and dispatch goes on: looked at without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from tests.ops.index_inputs import IndexInputs, index_inputs
from thalweg.layouts import mla_bf16, v4, v32
from thalweg.ops import cuda
from thalweg.ops.index_topk import hopper as fused
from thalweg.ops.mqa_logits import hopper as scoring
from thalweg.ops.sparse_mla import hopper as attention
from thalweg.ops.topk import hopper as selection


def scored(inputs: IndexInputs) -> str | None:
    out = torch.empty(len(inputs.lengths), inputs.page_table.shape[1] * inputs.cache.shape[1])
    return scoring.rejects(*vars(inputs).values(), out, False)


def test_what_they_are_for_is_taken() -> None:
    inputs = index_inputs([70, 3], heads=64)
    assert scored(inputs) is None
    assert fused.rejects(*list(vars(inputs).values())[:5], 512) is None
    assert selection.rejects(torch.empty(2, 9), inputs.lengths, 4, False, False) is None
    assert attention.rejects(*attended()) is None


@pytest.mark.parametrize("page_keys", [1, 16, 61])
def test_index_pages_that_hold_no_whole_tile(page_keys: int) -> None:
    said = str(scored(index_inputs([70, 3], page_keys=page_keys, heads=64)))
    assert f"pages of {page_keys} keys" in said and "multiple of 64" in said


def test_tables_of_64_bits_queries_apart_and_too_long_rows() -> None:
    inputs = index_inputs([70, 3], heads=64)
    inputs.page_table = inputs.page_table.long()
    assert "page table of torch.int64" in str(scored(inputs))
    inputs = index_inputs([70, 3], heads=64)
    inputs.q = torch.empty(2, 64, 130, dtype=torch.uint8)[:, :, :128].view(torch.float8_e4m3fn)
    assert "q of strides" in str(scored(inputs))
    wide = index_inputs([70], heads=64)
    wide.page_table = torch.zeros(1, fused.LONGEST // 64 + 1, dtype=torch.int32)
    assert f"they hold {fused.LONGEST} at most" in str(fused.rejects(*list(vars(wide).values())[:5], 512))


def test_selection_of_too_many_or_of_scores_apart() -> None:
    lengths = torch.tensor([3, 3])
    assert "2049" in str(selection.rejects(torch.empty(2, 9), lengths, 2049, False, False))
    assert "stride 2" in str(selection.rejects(torch.empty(2, 18)[:, ::2], lengths, 4, False, False))


def attended(**changes: object) -> list[object]:
    given = SimpleNamespace(
        q=torch.zeros(2, 64, 512, dtype=torch.bfloat16),
        cache=v4.allocate(2, 64),
        indices=torch.zeros(2, 128, dtype=torch.int32),
        lengths=None,
        sink=None,
        extra_cache=None,
        extra_indices=None,
        extra_lengths=None,
        scale=1.0,
        deterministic=False,
    )
    vars(given).update(changes)
    return list(vars(given).values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": torch.zeros(2, 64, 512)}, "q of torch.float32"),
        ({"q": torch.zeros(2, 64, 516, dtype=torch.bfloat16)[:, :, :512]}, "q of strides"),
        ({"indices": torch.zeros(2, 128, dtype=torch.int64)}, "torch.int64 indices"),
        ({"indices": torch.zeros(2, 256, dtype=torch.int32)[:, ::2]}, "stride 2"),
        ({"cache": mla_bf16.allocate(2, 64)}, "cache: of layout mla_bf16"),
        ({"scale": -1.0}, "scale -1.0"),
        (
            {"extra_cache": v32.allocate(2, 64), "extra_indices": torch.zeros(2, 1, dtype=torch.int32)},
            "extra cache: of layout v32",
        ),
    ],
)
def test_attention_that_the_kernel_does_not_take(changes: dict[str, object], reason: str) -> None:
    assert reason in str(attention.rejects(*attended(**changes)))


def test_lengths_of_64_bits_keep_their_meaning() -> None:
    given = torch.tensor([-(2**40), -1, 0, 7, 2**40])
    assert cuda.as_int32(given).tolist() == [-(2**31), -1, 0, 7, 2**31 - 1]
    assert cuda.as_int32(given).dtype == torch.int32
