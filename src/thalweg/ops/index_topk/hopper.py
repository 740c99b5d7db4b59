"""index_topk on Hopper: the scores' kernel of mqa_logits (hopper.cu there), and a selection that knows their maxima."""

import functools
from collections.abc import Iterable

import torch

from thalweg.layouts.index_fp8 import WIDTH
from thalweg.ops import cuda, hardware
from thalweg.ops.cuda import CudaVariant
from thalweg.ops.mqa_logits import choice as choices
from thalweg.ops.mqa_logits import hopper as scoring
from thalweg.ops.mqa_logits.live import check_live
from thalweg.ops.topk import hopper as selecting

LONGEST = scoring.GROUP * scoring.DENSE  # entries of a row
_SIGNATURE = (
    dict.fromkeys(("keys", "scales", "q", "weights", "lengths", "pages", "row_to_request", "scores"), "p")
    | dict.fromkeys(("out_indices", "out_slots"), "p")
    | dict.fromkeys(("requests", "heads", "span", "pool", "page_keys", "page_slots", "k"), "i")
    | dict.fromkeys(("q_row", "q_head", "page_stride", "scale_stride", "table_stride"), "l")
)


def rejects(q, cache, weights, lengths, page_table, k, *rest) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    span = page_table.shape[1] * cache.shape[1]
    if span > LONGEST:
        return f"rows of up to {span} entries, they hold {LONGEST} at most"
    return scoring.rejects_scoring(q, cache, page_table) or selecting.too_many(k)


def index_topk(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
    row_to_request: torch.Tensor | None,
    page_slots: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `thalweg.ops.index_topk`: products of e4m3; always deterministic here, indices rise.

    Scratch: 144 KiB a row of a launch, of 256 rows at most, from torch's allocator; nothing in it needs to be zero.
    """
    check_live(cache.shape[0], cache.shape[1], lengths, page_table, row_to_request)
    device, (rows, heads), (pool, page) = q.device, q.shape[:2], cache.shape[:2]
    requests, span = page_table.shape[0], page_table.shape[1] * page
    keys, scales = choices.codes_and_scales(cache, "fp8")
    lengths, owners = cuda.as_int32(lengths), scoring.owners_of(row_to_request, rows, device)
    weights = weights.contiguous()
    run_rows = scoring.run_rows_for(rows, requests)
    indices = torch.empty(rows, k, dtype=torch.int32, device=device)
    slots = torch.empty_like(indices)
    for part in scoring.parts(rows):
        count = part.stop - part.start
        scores = torch.empty(count, scoring.ROW_WORDS, dtype=torch.int32, device=device)
        scoring.launch(q, cache, weights, lengths, page_table, owners, part, run_rows, scores, True)
        # Only rows longer than DENSE are for more than one block.
        cluster = selecting.cluster_of(count, device) if span > scoring.DENSE else 1
        select_variant(scoring.heads_of(q)).launch(
            count * cluster, keys, scales, q[part], weights[part], lengths[part], page_table,
            None if owners is None else owners[part], scores, indices[part], slots[part],
            requests, heads, span, pool, page, page_slots, k,
            q.stride(0), q.stride(1), keys.stride(0), scales.stride(0), page_table.stride(0), cluster=cluster,
        )  # fmt: skip
    return indices, slots


@functools.cache
def select_variant(heads: int) -> CudaVariant:
    """The kernel that selects, and scores the best groups of long rows again."""
    tiles, queries = selecting.THREADS // 128 * scoring.TILE * WIDTH, heads * (WIDTH + 4)
    numbers = selecting.CAPACITY // scoring.GROUP + selecting.MOST + scoring.DENSE // scoring.TILE
    shared_memory = tiles + queries + 4 * numbers + selecting.selection_bytes()
    shared_memory += -shared_memory % 1024
    return CudaVariant(
        name=f"index_topk/hopper/select/heads{heads}",
        source="index_topk/hopper.cu",
        entry="select_kernel",
        defines=selecting.selection_defines() | {"HEAD_COUNT": heads, "DENSE": scoring.DENSE, "SHARED": shared_memory},
        signature=_SIGNATURE,
        threads=selecting.THREADS,
        shared_memory=shared_memory,
        representative=heads == 64,
        matrix=True,
    )


def variants(hardware: hardware.Hardware) -> Iterable[CudaVariant]:
    """Every configuration that `index_topk` can choose."""
    if hardware.name == "sm_90":
        for heads in (16, 32, 64):
            for run_rows in (1, 2, 4):
                yield scoring.score_variant(run_rows, heads, True)
            yield select_variant(heads)
