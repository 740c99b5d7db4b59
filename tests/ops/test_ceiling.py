"""Field case 1: the same 28K tokens under page tables as wide as 32,768, 262,144 and 1,048,576 tokens.

Seen: 217 -> 107 tok/s by raising a limit that nobody used; a gather of 553 MB a layer and step; 74% of decode in masked
tiles. Cost follows the tokens that are there: same bits, the same bytes allocated, the same work.
"""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.builders import NAN
from tests.ops.index_inputs import IndexInputs, index_inputs
from thalweg.layouts.work import Work, counting
from thalweg.ops import index_topk, mqa_logits, topk

KEYS = 28 * 1024 // 4
WIDTHS = [ceiling // 256 for ceiling in (32_768, 262_144, 1_048_576)]  # pages of 256 tokens, 64 keys at ratio 4


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that an operation inside makes anew: what is no view of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if is_tensor(t)
        }
        if func.namespace == "thalweg":
            # Straight to the implementation with the mode still on: a call would run it out of the mode's sight.
            with self:
                result = func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **(kwargs or {}))
            return result
        result = func(*args, **(kwargs or {}))
        for made in torch.utils._pytree.tree_leaves(result):
            if is_tensor(made) and made.untyped_storage().data_ptr() not in given:
                self.sizes.append(made.untyped_storage().nbytes())
        return result


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def run(
    operation: Callable[[IndexInputs], torch.Tensor], rows: int, width: int
) -> tuple[torch.Tensor, list[int], Work]:
    """The operation's result, the sizes that it allocated and the work it counted, under a page table `width` wide."""
    lengths = [KEYS - rows + 1 + row for row in range(rows)]
    inputs = index_inputs(lengths, rows_per_request=rows, table_width=width, heads=4)
    if rows == 1:
        inputs.row_to_request = torch.zeros(1, dtype=torch.int32)
    with counting() as work, Allocations() as allocations:
        result = operation(inputs)
    return result, allocations.sizes, work


def select(inputs: IndexInputs) -> torch.Tensor:
    return torch.stack(index_topk(**inputs.arguments(), k=512, deterministic=True))


def score(inputs: IndexInputs) -> torch.Tensor:
    """Into a buffer of the ceiling's width that is there before, as a captured graph has it."""
    return mqa_logits(**inputs.arguments(), out=buffer(inputs))[:, : KEYS - 3]


def select_from_buffer(inputs: IndexInputs) -> torch.Tensor:
    out = buffer(inputs)
    out[:, :KEYS] = torch.arange(KEYS) * 7919 % 1009
    return topk(out, inputs.lengths, 512, deterministic=True)


_buffers: dict[tuple[int, int], torch.Tensor] = {}


def buffer(inputs: IndexInputs) -> torch.Tensor:
    shape = (len(inputs.lengths), 64 * inputs.page_table.shape[1])
    return _buffers.setdefault(shape, torch.full((8, 64 * WIDTHS[-1]), NAN))[: shape[0], : shape[1]]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("operation", [select, score, select_from_buffer])
def test_a_ceiling_that_nobody_uses_changes_no_bit_and_costs_no_byte(operation: Callable, rows: int) -> None:
    for width in WIDTHS:  # so that buffers and caches of the process are there
        run(operation, rows, width)
    first, sizes, work = run(operation, rows, WIDTHS[0])
    assert len(sizes) > 10 and not first.float().isnan().any()
    for width in WIDTHS[1:]:
        other, other_sizes, other_work = run(operation, rows, width)
        assert torch.equal(other, first)
        assert other_sizes == sizes
        assert other_work == work


@pytest.mark.parametrize("rows", [1, 4])
def test_the_work_is_the_live_keys(rows: int) -> None:
    """112 pages are read once for all rows of the request, every row scores the request's 7,168 keys."""
    _, _, work = run(select, rows, WIDTHS[-1])
    assert (work.pages_read, work.rows_read, work.keys_scored) == (112, KEYS, rows * KEYS)


def test_the_count_of_allocations_sees_a_buffer_as_wide_as_the_table() -> None:
    """mqa_logits without `out` allocates its result at the table's width, as documented: the counter must see it."""

    def allocate(inputs: IndexInputs) -> torch.Tensor:
        return mqa_logits(**inputs.arguments())

    for width in WIDTHS:
        assert 4 * 64 * width * 4 in run(allocate, 4, width)[1]


def test_the_count_of_allocations_sees_inside_an_operation() -> None:
    """The keys of the request, decoded to float64, are made inside index_topk: 7,168 x 128 x 8 B."""
    assert KEYS * 128 * 8 in run(select, 1, WIDTHS[0])[1]
