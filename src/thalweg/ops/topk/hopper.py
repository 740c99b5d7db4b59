"""Exact selection on Hopper (hopper.cu): launches, and when they are possible."""

import functools
from collections.abc import Iterable

import torch

from thalweg.ops import cuda, hardware
from thalweg.ops.cuda import CudaVariant
from thalweg.ops.topk.triton import MOST, by_score, too_many

THREADS = 512
CAPACITY = 32_768  # keys that a block selects among at once
_ALONE = 8192  # scores up to which a row is for one block
_BINS = 2048
_CLUSTERS = (8, 4, 2)  # blocks of a row, as many as the multiprocessors hold at once


def rejects(logits: torch.Tensor, lengths: torch.Tensor, k: int, ordered: bool, deterministic: bool) -> str | None:
    """Why these arguments are not for the kernels, or None."""
    if logits.stride(1) != 1:
        return f"logits of stride {logits.stride(1)} along a row, not 1"
    return too_many(k)


def topk(logits: torch.Tensor, lengths: torch.Tensor, k: int, ordered: bool, deterministic: bool) -> torch.Tensor:
    """See `thalweg.ops.topk`: always deterministic here; not ordered, indices rise."""
    rows, width = logits.shape
    indices = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows:
        cluster = cluster_of(rows, logits.device)
        topk_variant().launch(
            rows * cluster, logits, cuda.as_int32(lengths), indices, width, k, logits.stride(0), cluster=cluster
        )
    return by_score(logits, indices) if ordered else indices


def cluster_of(rows: int, device: torch.device) -> int:
    """Blocks of a row."""
    most = hardware.multiprocessors(device)
    return next((cluster for cluster in _CLUSTERS if rows * cluster <= most), 1)


def selection_bytes() -> int:
    """Shared memory of `Selection`, with what aligns it and what follows."""
    return 4 * (CAPACITY + 2 * _BINS + 4 + THREADS // 32 + 3) + 1024


@functools.cache
def topk_variant() -> CudaVariant:
    """The kernel."""
    shared_memory = 4 * 2 * MOST + selection_bytes()
    return CudaVariant(
        name="topk/hopper",
        source="topk/hopper.cu",
        entry="topk_kernel",
        defines=selection_defines() | {"SHARED": shared_memory},
        signature=dict.fromkeys(("logits", "lengths", "out"), "p") | {"span": "i", "k": "i", "stride": "l"},
        threads=THREADS,
        shared_memory=shared_memory,
        representative=True,
    )


def selection_defines() -> dict[str, int]:
    """What kernels that select are compiled with."""
    return {"THREADS": THREADS, "CAPACITY": CAPACITY, "MOST": MOST, "ALONE": _ALONE}


def variants(hardware: hardware.Hardware) -> Iterable[CudaVariant]:
    """Every configuration that `topk` can choose."""
    if hardware.name == "sm_90":
        yield topk_variant()
