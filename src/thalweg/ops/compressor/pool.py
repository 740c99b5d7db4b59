"""Entries of a compressor: pooled, normed, turned, quantised and stored, and the open window carried. One launch.

Grid: a program a row. The first row of a request in the call owns what the call touches of its state: the entries whose window
reaches back into the ring (two at most), then, behind a barrier, the ring itself. A later row that completes an entry finds the
whole window in this call and pools it alone; all other programs end at once. In registers: SLOTS rows of the window of WIDTH
channels, and an online softmax of each channel, float32; norm, rope and rotation float64, then the layout's rounding.
"""

import triton
import triton.language as tl

from thalweg.ops.device.rope import hadamard, rms_norm, rope
from thalweg.ops.device.store import store_row


@triton.jit
def _rows_behind(state_slots, row, rows, slot, SCAN: tl.constexpr):
    """How many rows after `row` are of the same request: they are adjacent, and few calls hold more than one."""
    count = tl.zeros((), tl.int32)
    if tl.load(state_slots + row + 1, mask=row + 1 < rows, other=-1) == slot:
        for begin in range(row + 1, rows, SCAN):
            other = begin + tl.arange(0, SCAN)
            same = (tl.load(state_slots + other, mask=other < rows, other=-1) == slot) & (other < rows)
            count += tl.sum(same.to(tl.int32), 0)
    return count


@triton.jit
def _either(fresh_at, old_at, fresh, old):
    """float32: of this call's rows, or of the ring; zeros where neither."""
    value = tl.load(fresh_at, mask=fresh, other=0.0).to(tl.float32)
    return tl.where(old, tl.load(old_at, mask=old, other=0.0), value)


@triton.jit
def _pooled(
    kv, gate, own, ape, row, position, first, width, d, kv_row, gate_row, ring_row, ring_gate,
    RATIO: tl.constexpr, RING: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """float32 [WIDTH]: the entry that `position` completes; rows before `first` come from the ring at `own`."""
    channel = tl.arange(0, WIDTH)
    top = tl.full([WIDTH], float("-inf"), tl.float32)
    weight = tl.zeros([WIDTH], tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, RING, SLOTS):
        back = RING - 1 - begin - tl.arange(0, SLOTS)
        at = position - back
        column = channel[None, :]
        if RATIO == 4:  # four rows before the entry's own through the first half of the channels
            column = tl.where(back[:, None] < 4, d, 0) + channel[None, :]
        there = (at >= 0)[:, None] & (channel < d)[None, :]
        fresh = there & (row - back >= first)[:, None]
        old = there & (row - back < first)[:, None]
        from_row = (row - back).to(tl.int64)[:, None]
        in_ring = own + (at % RING).to(tl.int64)[:, None] * ring_row + column
        values = _either(kv + from_row * kv_row + column, in_ring, fresh, old)
        logits = _either(gate + from_row * gate_row + column, in_ring + ring_gate, fresh, old)
        logits += tl.load(ape + (at % RATIO)[:, None] * width + column, mask=there, other=0.0)
        logits = tl.where(there, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf minus itself is NaN
        decay = tl.exp(top - safe)
        weights = tl.exp(logits - safe[None, :])
        weight = weight * decay + tl.sum(weights, 0)
        total = total * decay + tl.sum(weights * values, 0)
        top = new_top
    return tl.where(channel < d, total / weight, 0.0)


@triton.jit
def _carry(kv, gate, own, row, position, behind, width, kv_row, gate_row, ring_row, ring_gate,
           RING: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The last RING of the rows `row` to row + behind into the ring at `own`."""
    column = tl.arange(0, COLUMNS)[None, :]
    for begin in range(tl.maximum(behind + 1 - RING, 0), behind + 1, SLOTS):
        each = begin + tl.arange(0, SLOTS)
        there = (each <= behind)[:, None] & (column < width)
        from_row = (row + each).to(tl.int64)[:, None]
        into = own + ((position + each) % RING).to(tl.int64)[:, None] * ring_row + column
        values = tl.load(kv + from_row * kv_row + column, mask=there, other=0.0)
        gates = tl.load(gate + from_row * gate_row + column, mask=there, other=0.0)
        tl.store(into, values.to(tl.float32), mask=there)
        tl.store(into + ring_gate, gates.to(tl.float32), mask=there)


@triton.jit
def compress_kernel(
    kv, gate, state, ape, positions, state_slots, cache_slots, norm, frequencies, cache,
    rows, width, d, pairs, states, pool, page_slots,
    kv_row, gate_row, state_row, ring_row, ring_gate, page_stride, eps, eps_rest,
    LAYOUT: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, HADAMARD: tl.constexpr,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr, COLUMNS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """kv and gate [rows, width] -> state float32 [states, RING, 2, width] and entries of d channels in `cache`."""
    row = tl.program_id(0)
    slot = tl.load(state_slots + row)
    if (slot >= 0) & (slot < states):
        position = tl.load(positions + row).to(tl.int32)
        own = state + slot.to(tl.int64) * state_row
        is_first = tl.load(state_slots + row - 1, mask=row > 0, other=-1) != slot
        behind = tl.zeros((), tl.int32)
        if is_first:
            behind = _rows_behind(state_slots, row, rows, slot, SCAN)
        completes = position % RATIO == RATIO - 1
        back = row - (RING - 1)
        whole = tl.load(state_slots + back, mask=back >= 0, other=-1) == slot
        # Entries of the first row: at offsets whose window reaches back before it. Of another: its own, if whole.
        begin = tl.where(is_first, RATIO - 1 - position % RATIO, 0)
        end = tl.where(is_first, tl.minimum(behind + 1, RING - 1), (completes & whole).to(tl.int32))
        first = tl.where(is_first, row, back)
        for offset in range(begin, end, RATIO):
            target = tl.load(cache_slots + row + offset)
            if (target >= 0) & (target < pool):
                entry = _pooled(
                    kv, gate, own, ape, row + offset, position + offset, first, width, d,
                    kv_row, gate_row, ring_row, ring_gate, RATIO, RING, SLOTS, WIDTH,
                ).to(tl.float64)  # fmt: skip
                entry = rms_norm(entry, norm, d, eps, eps_rest, WIDTH)
                entry = rope(entry, position + offset - (RATIO - 1), frequencies, d // 2 - pairs, pairs, WIDTH)
                if HADAMARD:
                    entry = tl.reshape(hadamard(tl.reshape(entry, [1, WIDTH]), 1, WIDTH, LOG2), [WIDTH])
                values = entry.to(tl.float32)
                if LAYOUT != "exact":
                    values = values.to(tl.bfloat16).to(tl.float32)
                store_row(values, cache, target, page_slots, page_stride, d, LAYOUT, WIDTH)
        if is_first:
            tl.debug_barrier()  # every thread has read the ring
            _carry(
                kv, gate, own, row, position, behind, width, kv_row, gate_row, ring_row, ring_gate, RING, SLOTS, COLUMNS
            )  # fmt: skip
