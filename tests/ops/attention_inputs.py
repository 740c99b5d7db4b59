"""Caches, index lists and the softmax over them written out in float64: what sparse_mla is compared with."""

import math

import numpy as np
import torch

from tests.ops.builders import NAN, randn, stored_value, wide
from thalweg.layouts import exact, mla_bf16, v4, v32

MODULES = {"v4": v4, "v32": v32, "mla_bf16": mla_bf16, "exact": exact}


def filled(
    generator: torch.Generator, layout: str, pages: int, page_slots: int, width: int = 512
) -> tuple[torch.Tensor, dict[int, np.ndarray]]:
    """A cache with rows in every page but 0, which holds NaN codes, and {slot: the row as it must be read}."""
    width = width if layout in ("exact", "v4") else 576
    cache = (
        exact.allocate(pages, page_slots, width) if layout == "exact" else MODULES[layout].allocate(pages, page_slots)
    )
    poison(cache)
    count = (pages - 1) * page_slots
    rows = randn(generator, count, width)
    slots = torch.arange(page_slots, page_slots + count)
    MODULES[layout].write(cache, slots, rows)
    return cache, {int(slot): stored_value(layout, row.numpy()) for slot, row in zip(slots, rows, strict=True)}


def poison(cache: torch.Tensor) -> None:
    if cache.dtype == torch.uint8:
        cache.as_strided((cache.shape[0], cache.shape[1] * cache.shape[3]), (cache.stride(0), 1)).fill_(0xFF)
    else:
        cache.fill_(NAN)


def attention(
    q: torch.Tensor, rows: list[np.ndarray], sink: torch.Tensor | None, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """(out [H, 512], lse [H]) of one query row [H, d] over cached rows, straight from the formula; values are the first 512."""
    heads = q.shape[0]
    out, lse = np.zeros((heads, 512)), np.full(heads, -math.inf)
    if not rows:
        return out, lse
    keys = np.array(rows)
    for head in range(heads):
        s = keys @ wide(q[head]) * scale
        top = s.max()
        weights = np.exp(s - top)
        lse[head] = top + math.log(weights.sum())
        below = weights.sum() + (0.0 if sink is None else math.exp(float(sink[head]) - top))
        out[head] = weights @ keys[:, :512] / below
    return out, lse


def live_rows(indices: torch.Tensor, length: int | None, known: dict[int, np.ndarray]) -> list[np.ndarray]:
    """The cached rows that a list names: before its length, not -1."""
    listed = indices.tolist()[: None if length is None else max(length, 0)]
    return [known[slot] for slot in listed if slot != -1]
