"""Indexer scores on Hopper (hopper.cu): launches, and when they are possible."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from thalweg.layouts import index_fp8
from thalweg.ops import cuda, hardware
from thalweg.ops.cuda import CudaVariant
from thalweg.ops.mqa_logits import choice as choices
from thalweg.ops.mqa_logits.live import check_live
from thalweg.ops.mqa_logits.triton import FILL, fill_variant

TILE = 64  # keys
MOST_ROWS = 256  # of a launch; more take several
DENSE = 32_768  # entries whose keys index_topk has in scratch
GROUP = 8  # of whose keys it has the highest
ROW_WORDS = DENSE + DENSE // GROUP


@dataclass(frozen=True)
class _Run:
    """How rows of one request are scored at once."""

    pass_rows: int  # in one product
    blocks: int  # of a multiprocessor
    teams: int  # of 128 threads, in a block
    stages: int  # tiles in flight
    hold: bool  # weights stay in registers
    registers: int = 0  # of a thread that multiplies, where the copying team gives it its own


_RUNS = {
    1: _Run(1, 2, 2, 4, True),
    2: _Run(2, 3, 1, 2, True),
    4: _Run(2, 1, 4, 8, False, 112),
}
_SIGNATURE = (
    {"keys": "m"}
    | dict.fromkeys(("scales", "q", "weights", "lengths", "pages", "row_to_request", "out"), "p")
    | dict.fromkeys(("rows", "requests", "heads", "span", "pool", "page_keys"), "i")
    | dict.fromkeys(("q_row", "q_head", "scale_stride", "table_stride"), "l")
    | {"row_words": "i"}
)


def rejects(q, cache, weights, lengths, page_table, row_to_request, out, clean) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    if MOST_ROWS * out.stride(0) >= 2**31:
        return f"rows of logits {out.stride(0)} apart, they count to 2^31 over {MOST_ROWS} rows"
    return rejects_scoring(q, cache, page_table) or choices.rejects_out(out)


def rejects_scoring(q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor) -> str | None:
    """Why such queries, keys and tables are not for the kernels, or None."""
    if reason := choices.rejects(q, cache, page_table):
        return reason
    if cache.shape[1] % TILE or not cache.shape[0]:
        return f"a cache of {cache.shape[0]} pages of {cache.shape[1]} keys, they read pages of a multiple of {TILE}"
    if cache.stride(0) % 16 or cache.data_ptr() % 16:
        return f"pages {cache.stride(0)} bytes apart at address {cache.data_ptr():#x}, not multiples of 16"
    if q.stride(0) % 16 or q.stride(1) % 16 or q.data_ptr() % 16:
        return f"q of strides {q.stride()} at address {q.data_ptr():#x}, not multiples of 16"
    if page_table.dtype != torch.int32:
        return f"a page table of {page_table.dtype}, not int32"
    return None


def mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor | None,
    out: torch.Tensor,
    clean: bool,
) -> None:
    """See `thalweg.ops.mqa_logits`: products of e4m3."""
    check_live(cache.shape[0], cache.shape[1], lengths, page_table, row_to_request)
    rows, requests = q.shape[0], page_table.shape[0]
    lengths, owners = cuda.as_int32(lengths), owners_of(row_to_request, rows, q.device)
    run_rows = run_rows_for(rows, requests)
    for part in parts(rows):
        launch(q, cache, weights, lengths, page_table, owners, part, run_rows, out[part], False)
    if clean and rows:
        fill_variant().launch((rows, -(-out.shape[1] // FILL)), out, lengths, out.shape[1], out.stride(0))


def launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    owners: torch.Tensor | None,
    part: slice,
    run_rows: int,
    out: torch.Tensor,
    keys_wanted: bool,
) -> None:
    """Scores the rows of `part` into `out`: logits, or what index_topk selects from, ROW_WORDS words of 32 bits a row."""
    pool, page = cache.shape[:2]
    keys, scales = choices.codes_and_scales(cache, "fp8")
    variant = score_variant(run_rows, heads_of(q), keys_wanted)
    keys_map = cuda.tensor_map(
        keys.data_ptr(),
        (index_fp8.WIDTH, page, pool),
        (index_fp8.WIDTH, max(keys.stride(0), 16)),
        (index_fp8.WIDTH, TILE, 1),
    )
    blocks = _RUNS[run_rows].blocks * hardware.multiprocessors(q.device)
    variant.launch(
        blocks, keys_map, scales, q[part], weights[part].contiguous(), lengths[part], page_table,
        None if owners is None else owners[part], out,
        part.stop - part.start, page_table.shape[0], q.shape[1], page_table.shape[1] * page, pool, page,
        q.stride(0), q.stride(1), scales.stride(0), page_table.stride(0), out.stride(0),
    )  # fmt: skip


def run_rows_for(rows: int, requests: int) -> int:
    """How many rows of a request share a read of its keys."""
    per_request = -(-rows // max(1, requests))
    return next((most for most in _RUNS if per_request <= most), max(_RUNS))


def parts(rows: int) -> list[slice]:
    """The rows of each launch."""
    return [slice(start, min(rows, start + MOST_ROWS)) for start in range(0, rows, MOST_ROWS)]


def owners_of(row_to_request: torch.Tensor | None, rows: int, device: torch.device) -> torch.Tensor | None:
    """Each row's request, or None: row r's is r, where one launch takes all rows."""
    if row_to_request is not None:
        return cuda.as_int32(row_to_request)
    return torch.arange(rows, dtype=torch.int32, device=device) if rows > MOST_ROWS else None


def heads_of(q: torch.Tensor) -> int:
    """The heads of a product that has q's."""
    return 1 << max(4, (q.shape[1] - 1).bit_length())


@functools.cache
def score_variant(run_rows: int, heads: int, keys: bool) -> CudaVariant:
    """The kernel for runs of `run_rows` rows that writes logits, or keys and maxima."""
    run = _RUNS[run_rows]
    threads = 128 * run.teams + (128 if run.registers else 32)
    tiles = run.stages * (TILE * index_fp8.WIDTH + TILE * 4 + 2 * 8 + 4)
    queries = run_rows * heads * (index_fp8.WIDTH + 4)
    shared_memory = tiles + queries + 3 * 4 * MOST_ROWS + threads // 8 + 4
    shared_memory += -shared_memory % 1024
    defines = {"RUN": run_rows, "PASS": run.pass_rows, "HEAD_COUNT": heads, "KEYS": int(keys), "STAGES": run.stages}
    defines |= {"HOLD": int(run.hold), "TEAMS": run.teams, "SCORER_REGISTERS": run.registers}
    defines |= {"PER_MULTIPROCESSOR": run.blocks, "MOST_ROWS": MOST_ROWS, "DENSE": DENSE, "SHARED": shared_memory}
    return CudaVariant(
        name=f"{'index_topk' if keys else 'mqa_logits'}/hopper/score/heads{heads}/rows{run_rows}",
        source="mqa_logits/hopper.cu",
        entry="score_kernel",
        defines=defines,
        signature=_SIGNATURE,
        threads=threads,
        shared_memory=shared_memory,
        representative=heads == 64,
        matrix=True,
    )


def variants(hardware: hardware.Hardware) -> Iterable[CudaVariant]:
    """Every configuration that the operation can choose."""
    if hardware.name == "sm_90":
        for heads in (16, 32, 64):
            for run_rows in _RUNS:
                yield score_variant(run_rows, heads, False)
