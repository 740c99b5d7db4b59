"""Exact selection of the k highest, in pieces that kernels share: `topk` over given scores, `index_topk` over its own.

A program goes through a stretch of a row, a segment. It keeps a list of candidates in scratch memory, in the order of their
indices, and a bar: what does not exceed it cannot be among the k. At the segment's end it posts a bound that enough of its
entries reach, so that the least bound of a row's segments is one for the row. A second launch merges the lists.

Scores are compared as unsigned keys of the same order (NaN highest); key 0 is no entry.
"""

import triton
import triton.language as tl


@triton.jit
def to_key(score):
    """Float32 scores to uint32 keys of the same order: +0 = -0, NaN above +inf; never 0."""
    score = score + 0.0
    bits = score.to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    return tl.where(score != score, 0xFFFFFFFE, key).to(tl.uint32)


@triton.jit
def search(key, count, k, slack):
    """(low, at_low, at_high): at_low >= k keys reach `low`, k + slack at most unless more than that are equal to the k-th.

    Then low is the k-th highest key itself and at_high < k keys are above it. key uint32 [N], 0 = no entry; count: entries
    among them, at least k. Four-way search over the keys' own range.
    """
    low = tl.min(tl.where(key == 0, 0xFFFFFFFF, key).to(tl.uint32), 0)
    high = tl.max(key, 0) + 1
    at_low = count
    at_high = count * 0
    while (at_low > k + slack) & (high - low > 1):
        width = high - low
        middle = low + width // 2
        first = low + width // 4
        last = middle + width // 4
        # Three counts of 20 bits stand in 64, so that one reduction sums them.
        ones = (key >= first).to(tl.int64)
        ones += (key >= middle).to(tl.int64) << 20
        ones += (key >= last).to(tl.int64) << 40
        sums = tl.sum(ones, 0)
        at_first = (sums & 0xFFFFF).to(tl.int32)
        at_middle = ((sums >> 20) & 0xFFFFF).to(tl.int32)
        at_last = (sums >> 40).to(tl.int32)
        above = at_high
        high_before = high
        high = tl.where(at_last >= k, high_before, tl.where(at_middle >= k, last, tl.where(at_first >= k, middle, first)))
        at_high = tl.where(at_last >= k, above, tl.where(at_middle >= k, at_last, tl.where(at_first >= k, at_middle, at_first)))
        at_low = tl.where(at_last >= k, at_last, tl.where(at_middle >= k, at_middle, tl.where(at_first >= k, at_first, at_low)))
        low = tl.where(at_last >= k, last, tl.where(at_middle >= k, middle, tl.where(at_first >= k, first, low)))
    return low, at_low, at_high


@triton.jit
def places(key, low, ties):
    """(keep, place) for the keys above `low` and the first `ties` of those equal to it: place counts them in their order."""
    above = key > low
    equal = key == low
    ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    higher = ranks & 0xFFFF
    even = ranks >> 16
    keep = above | (equal & (even <= ties))
    return keep, higher + tl.minimum(even, ties) - 1


@triton.jit
def compress(keys, indices, count, k, slack, CAPACITY: tl.constexpr):
    """Shrinks a list of `count` >= k candidates to k ... k + slack, in place and in order; returns (count, bar)."""
    entry = tl.arange(0, CAPACITY)
    key = tl.load(keys + entry, mask=entry < count, other=0).to(tl.uint32, bitcast=True)
    low, at_low, at_high = search(key, count, k, slack)
    enough = at_low <= k + slack
    keep, place = places(key, low, tl.where(enough, CAPACITY, k - at_high))
    index = tl.load(indices + entry, mask=keep, other=0)
    tl.debug_barrier()  # everybody has read before anybody writes
    tl.store(keys + place, key.to(tl.int32, bitcast=True), mask=keep)
    tl.store(indices + place, index, mask=keep)
    tl.debug_barrier()
    return tl.where(enough, at_low, k), low


@triton.jit
def absorb(key, index, keys, indices, count, bar, k, SIZE: tl.constexpr, CAPACITY: tl.constexpr):
    """Appends the keys [SIZE] above the bar to a list; returns its (count, bar). CAPACITY >= k + k // 4 + SIZE."""
    keep = key > bar
    places_taken = tl.cumsum(keep.to(tl.int32), 0)
    new = tl.sum(keep.to(tl.int32), 0)
    place = count + places_taken - 1
    tl.store(keys + place, key.to(tl.int32, bitcast=True), mask=keep)
    tl.store(indices + place, index, mask=keep)
    count += new
    if count > CAPACITY - SIZE:
        tl.debug_barrier()
        count, bar = compress(keys, indices, count, k, k // 4, CAPACITY)
    return count, bar


@triton.jit
def list_of(number, first_program, row, row_in_run, rows, ROWS: tl.constexpr):
    """The list of a row's segment `number`: of the row itself where it begins, else of the program that goes on with it."""
    return tl.where(number == 0, row, rows + (first_program + number) * ROWS + row_in_run)


@triton.jit
def load_list(keys, indices, count, CAPACITY: tl.constexpr):
    """A list as (key, index) [CAPACITY]; key 0 beyond its end."""
    entry = tl.arange(0, CAPACITY)
    key = tl.load(keys + entry, mask=entry < count, other=0).to(tl.uint32, bitcast=True)
    return key, tl.load(indices + entry, mask=entry < count, other=0)


@triton.jit
def post_bound(keys, count, bound_at, scored, length, k, CAPACITY: tl.constexpr):
    """Posts a bound that this segment's part of the row's k best reaches: k x scored / length of them, rounded up."""
    part = tl.minimum((k.to(tl.int64) * scored + length - 1) // tl.maximum(length, 1), scored).to(tl.int32)
    bound = tl.full((), 0xFFFFFFFF, tl.uint32)  # nothing of this row is here
    if scored > 0:
        entry = tl.arange(0, CAPACITY)
        key = tl.load(keys + entry, mask=entry < count, other=0).to(tl.uint32, bitcast=True)
        low, at_low, at_high = search(key, count, part, part // 4)
        bound = low
    tl.store(bound_at, bound.to(tl.int32, bitcast=True))


@triton.jit
def best(key, count, k, CAPACITY: tl.constexpr):
    """(keep, place, kept) for the min(k, count) highest of `count` keys [CAPACITY]; of equal ones the first."""
    low = tl.full((), 1, tl.uint32)
    ties = tl.full((), CAPACITY, tl.int32)
    if count > k:
        lowest, at_low, at_high = search(key, count, k, 0)
        low = lowest
        ties = tl.where(at_low <= k, CAPACITY, k - at_high)
    keep, place = places(key, low, ties)
    return keep, place, tl.minimum(count, k)
