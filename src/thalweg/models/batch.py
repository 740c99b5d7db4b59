"""The shape of a step: rows of several requests, flattened, and the tables that say where their cache lies."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowBatch:
    """Rows of one step, flattened over requests: rows of one request are adjacent and in order of position.

    A decode step has one row a request, a prefill chunk many, and both may stand in one batch.
    """

    tokens: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    row_to_request: torch.Tensor
    """int64 [T], index into the tables"""
    page_table: torch.Tensor
    """int64 [B, W], ids of 256-token logical pages, -1 = none"""
    window_table: torch.Tensor
    """int64 [B, W], ids of window pages (V4 only), -1 = none or freed"""
    state_slots: torch.Tensor
    """int64 [B], rows of the compressor state (V4 only)"""
