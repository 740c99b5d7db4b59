"""Random inputs for the index operations: a pool of permuted pages, and sets of arguments that share no page of it."""

from dataclasses import dataclass

import torch

from thalweg.kernels.bench.index.cases import HEADS, PAGE_KEYS, Case
from thalweg.layouts import index_fp8, sizes
from thalweg.layouts.e4m3 import amax_scale, to_e4m3

CACHED_BYTES = 60 * 10**6  # the L2 of an H200; sets are rotated until they are twice that
MOST_SETS = 32
MOST_BYTES = 16 * 2**30
_PAGES_AT_ONCE = 4096
DEAD_SCORE = 3e38  # past every length: whoever ignores the lengths selects it


@dataclass
class Inputs:
    """Arguments of one call, shapes as in `thalweg.ops.index_topk`; `logits` [R, 64 x table width] are scores to select from."""

    case: Case
    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    row_to_request: torch.Tensor | None
    logits: torch.Tensor
    out: torch.Tensor

    def table_of_rows(self, rows_of_one: int = 1) -> torch.Tensor:
        """The page table with one line for every `rows_of_one` rows, for peers without row_to_request."""
        return self.page_table.repeat_interleave(self.case.rows // rows_of_one, dim=0).contiguous()


def number_of_sets(case: Case, ops: list[str]) -> int:
    """So many that what one of `ops` reads does not stay in the L2 between its calls, within reason."""
    least = min(case.bytes_moved(op) for op in ops)
    buffers = 2 * case.total_rows * case.table_width * PAGE_KEYS * 4
    each = buffers + case.batch * case.live_pages * PAGE_KEYS * sizes.INDEX_FP8_KEY_BYTES
    return max(1, min(-(-2 * CACHED_BYTES // least), MOST_SETS, MOST_BYTES // each))


def sets(case: Case, ops: list[str], device: torch.device, seed: int) -> list[Inputs]:
    """As many sets for `case` as `number_of_sets` says."""
    return make(case, number_of_sets(case, ops), device, seed)


def make(case: Case, count: int, device: torch.device, seed: int) -> list[Inputs]:
    """`count` sets for `case`; the same seed gives the same sets."""
    generator = torch.Generator(device).manual_seed(seed)
    live = case.batch * case.live_pages
    cache = _random_pool(count * live, device, generator)
    # One page more than is used, so that no set is the pool in order even where it needs all of it.
    pages = torch.randperm(cache.shape[0], device=device, generator=generator).to(torch.int32)
    return [_one_set(case, cache, pages[n * live : (n + 1) * live], generator) for n in range(count)]


def _one_set(case: Case, cache: torch.Tensor, pages: torch.Tensor, generator: torch.Generator) -> Inputs:
    device, rows = cache.device, case.total_rows

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    q = normal(rows, HEADS, sizes.INDEX_DIM)
    scale = amax_scale(q)
    page_table = torch.zeros(case.batch, case.table_width, dtype=torch.int32, device=device)
    page_table[:, : case.live_pages] = pages.view(case.batch, -1)
    logits = torch.full((rows, case.table_width * PAGE_KEYS), DEAD_SCORE, device=device)
    logits[:, : case.keys] = normal(rows, case.keys)
    request = torch.arange(case.batch, dtype=torch.int32, device=device)
    return Inputs(
        case=case,
        q=to_e4m3(q / scale.unsqueeze(-1)),
        cache=cache,
        # As the model folds them: the head's weight, the softmax scale and the scale of q.
        weights=normal(rows, HEADS) * scale * (sizes.INDEX_DIM * HEADS) ** -0.5,
        lengths=torch.full((rows,), case.keys, dtype=torch.int32, device=device),
        page_table=page_table,
        row_to_request=None if case.rows == 1 else request.repeat_interleave(case.rows),
        logits=logits,
        out=torch.empty_like(logits),
    )


def _random_pool(pages: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    cache = index_fp8.allocate(pages + 1, device=device)
    for part in cache.split(_PAGES_AT_ONCE):
        keys = torch.randn(part.shape[0], PAGE_KEYS, sizes.INDEX_DIM, device=device, generator=generator)
        codes, scales = index_fp8.encode(keys)
        code_block, scale_block = index_fp8.blocks(part)
        code_block.copy_(codes.view(torch.uint8))
        scale_block.copy_(scales.unsqueeze(-1).contiguous().view(torch.uint8))
    return cache
