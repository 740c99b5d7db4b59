"""The c4 and c128 compressors in plain PyTorch, the same code for a prefill chunk and a decode step.

Carried per request: the raw kv and gate rows of the last `ring` positions, at position modulo ring. An entry that completes
at position p pools positions p - ring + 1 .. p: from this call's rows where they are here, else from the ring. Rows that may
be taken back (verification of drafts) overwrite what a roll-back needs: they want a state of their own.
"""

import torch

from thalweg.layouts import exact
from thalweg.layouts.registry import layout_of
from thalweg.ops.checks import in_pool
from thalweg.ops.compressor.plan import CompressPlan
from thalweg.ops.rotary import hadamard, rms_norm, rotate

# Entries pooled at once: bounds the gathered [entries, ring, width] block.
_BLOCK = 64


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    state: torch.Tensor,
    ape: torch.Tensor,
    plan: CompressPlan,
    norm_weight: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    cache: torch.Tensor,
    ratio: int,
    rotate_hadamard: bool,
    eps: float,
) -> None:
    """See `thalweg.ops.compress`."""
    positions, state_slots = plan.positions.long(), plan.state_slots.long()
    real = in_pool("compress state_slots", state_slots, state_slots != -1, state.shape[0])
    state_slots = torch.where(real, state_slots, -1)
    completes = real & (positions % ratio == ratio - 1)
    completes = in_pool("compress cache_slots", plan.cache_slots, completes, cache.shape[0] * cache.shape[1])
    for rows in completes.nonzero().squeeze(1).split(_BLOCK):
        kv_slots, gate_slots = _gather(kv, gate, state, positions, state_slots, rows)
        pooled = _pool(kv_slots, gate_slots, ape, positions[rows], ratio)
        entry = rotate(rms_norm(pooled, norm_weight, eps), positions[rows] - (ratio - 1), inverse_frequencies)
        if rotate_hadamard:
            entry = hadamard(entry)
        entry = entry.float()
        layout = layout_of(cache)
        if layout is not exact:
            entry = entry.to(torch.bfloat16)  # before amax and e4m3, as SGLang does: bytes are compared
        layout.write(cache, plan.cache_slots[rows], entry)
    _carry(kv, gate, state, positions, state_slots)


def _gather(
    kv: torch.Tensor,
    gate: torch.Tensor,
    state: torch.Tensor,
    positions: torch.Tensor,
    state_slots: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """kv and gate [entries, ring, width] of the `ring` positions up to each completing row."""
    ring = state.shape[1]
    back = torch.arange(ring - 1, -1, -1, device=kv.device)
    source_row = rows.unsqueeze(1) - back
    source_position = positions[rows].unsqueeze(1) - back
    slot = state_slots[rows].unsqueeze(1)
    here = source_row.clamp(min=0)
    fresh = (source_row >= 0) & (state_slots[here] == slot) & (positions[here] == source_position)
    ring_row = source_position.clamp(min=0) % ring
    kv_slots = torch.where(fresh.unsqueeze(-1), kv[here].float(), state[slot, ring_row, 0])
    gate_slots = torch.where(fresh.unsqueeze(-1), gate[here].float(), state[slot, ring_row, 1])
    return kv_slots, gate_slots


def _pool(
    kv_slots: torch.Tensor, gate_slots: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, ratio: int
) -> torch.Tensor:
    """Per-channel softmax over the slots, weighted sum of kv: float64 [entries, d]."""
    kv_slots, logits = kv_slots.double(), gate_slots.double()
    if ratio == 4:
        # Four slots of the entry before through channels [0, d), four of this one through channels [d, 2d).
        d = kv_slots.shape[-1] // 2
        bias = ape.double()
        kv_slots = torch.cat((kv_slots[:, :4, :d], kv_slots[:, 4:, d:]), dim=1)
        logits = torch.cat((logits[:, :4, :d] + bias[:, :d], logits[:, 4:, d:] + bias[:, d:]), dim=1)
        first = (positions < ratio).view(-1, 1, 1)  # entry 0 has no predecessor
        before = torch.arange(8, device=kv_slots.device).view(1, 8, 1) < 4
        logits = logits.masked_fill(first & before, float("-inf"))
        kv_slots = kv_slots.masked_fill(first & before, 0.0)  # never 0 x NaN of a stale state row
    else:
        logits = logits + ape.double()
    return (torch.softmax(logits, dim=1) * kv_slots).sum(dim=1)


def _carry(
    kv: torch.Tensor, gate: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, state_slots: torch.Tensor
) -> None:
    """Writes the last `ring` rows of each request into its ring. Only those: an index written twice has no order."""
    ring = state.shape[1]
    row = torch.arange(positions.numel(), device=kv.device)
    later = row + ring
    inside = later < positions.numel()
    ahead = later.clamp(max=max(positions.numel() - 1, 0))
    overwritten = inside & (state_slots[ahead] == state_slots)
    keep = (state_slots >= 0) & ~overwritten
    where = (state_slots[keep], positions[keep] % ring)
    state[where[0], where[1], 0] = kv[keep].float()
    state[where[0], where[1], 1] = gate[keep].float()
