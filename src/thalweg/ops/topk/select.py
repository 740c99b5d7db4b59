"""Exact selection of the k highest, in pieces that kernels share: `topk` over given scores, `index_topk` over its own.

Scores are compared as uint32 keys of the same order (NaN highest); key 0 is no entry. Two levels: of the groups of eight
entries, the k with the highest maxima (of equal ones the first) hold all of the k best entries: an entry elsewhere has k
maxima before it. So a program reads the maxima, and then 8 k entries of however many.
"""

import triton
import triton.language as tl


@triton.jit
def to_key(score):
    """Float32 scores to uint32 keys of the same order: +0 = -0, NaN above +inf; never 0, never the highest uint32."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    # Any NaN: its bits as they are could be the highest key, above which `search` has no bound, or on some devices key 0.
    return tl.where(score != score, 0xFFFFFFFE, key).to(tl.uint32)


@triton.jit
def load_keys(source, entry, live, FLOAT: tl.constexpr):
    """The keys of entries: from float32 scores (FLOAT), or from keys; 0 where not live."""
    if FLOAT:
        key = tl.where(live, to_key(tl.load(source + entry, mask=live, other=0.0)), 0)
    else:
        key = tl.load(source + entry, mask=live, other=0).to(tl.uint32, bitcast=True)
    return key


@triton.jit
def to_score(key):
    """The finite score of a key, or the nearest finite one."""
    key = tl.minimum(tl.maximum(key, 0x00800000), 0xFF7FFFFF).to(tl.uint32)
    bits = tl.where(key >= 0x80000000, key & 0x7FFFFFFF, ~key).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def outset(key, low, high, count, k):
    """Two keys, on both sides of where the k-th highest of `count` normally distributed scores is."""
    # Around the middle of the range, so that far-away scores lose no digits.
    middle = to_score(low) * 0.5 + to_score(high) * 0.5
    score = tl.where(key == 0, middle, to_score(key)) - middle
    share = 1.0 / count.to(tl.float32)
    mean = tl.sum(score, 0) * share
    deviation = tl.sqrt(tl.maximum(tl.sum(score * score, 0) * share - mean * mean, 0.0))
    part = share * k  # k may be a constant: Triton makes one of every argument that is 1
    tail = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.minimum(part, 1.0 - part), 1e-7)))
    # Abramowitz and Stegun 26.2.22.
    away = tail - (2.30753 + 0.27061 * tail) / (1.0 + 0.99229 * tail + 0.04481 * tail * tail)
    expected = middle + mean + deviation * tl.where(part < 0.5, away, -away)
    return to_key(expected - 0.1 * deviation), to_key(expected + 0.1 * deviation)


@triton.jit
def search(key, count, k, slack):
    """(low, at_low, at_high): at_low >= k keys reach `low`, k + slack at most unless more than that are equal to the k-th.

    Then low is the k-th highest key itself and at_high < k keys are above it. key uint32 [N], N < 2^15, 0 = no entry; count:
    entries among them, at least k. A round counts what reaches two keys of the range that is left: at first on both sides of
    where the k-th of a normal distribution is, then of an even one, or, where that did not halve the entries in the range, the
    middles of keys and scores.
    """
    low = tl.min(tl.where(key == 0, 0xFFFFFFFF, key).to(tl.uint32), 0)
    high = tl.max(key, 0) + 1
    at_low = count
    at_high = count * 0
    first, second = outset(key, low, high, count, k)
    even = True
    while (at_low > k + slack) & (high - low > 1):
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, low + 1), high - 1)
        # Two counts of 16 bits stand in 32, so that one reduction sums them.
        sums = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16), 0)
        before = at_low - at_high
        low, at_low, high, at_high = narrow(low, at_low, high, at_high, first, sums & 0xFFFF, k)
        low, at_low, high, at_high = narrow(low, at_low, high, at_high, second, sums >> 16, k)
        inside = at_low - at_high
        even = inside * 2 <= before
        share = 1.0 / inside.to(tl.float32)
        low_score = to_score(low)
        high_score = to_score(high)
        part = tl.where(even, (at_low - k).to(tl.float32) * share, 0.5)
        spread = (high_score * share - low_score * share) * (1.0 + tl.sqrt(inside.to(tl.float32)) * 0.25)
        expected = low_score * (1.0 - part) + high_score * part
        first = tl.where(even, to_key(expected - spread), low + (high - low) // 2)
        second = to_key(tl.where(even, expected + spread, expected))
    return low, at_low, at_high


@triton.jit
def narrow(low, at_low, high, at_high, key, reached, k):
    """The range [low, high) of the k-th key, now that `reached` entries are known to reach `key`."""
    up = (reached >= k) & (key > low)
    down = (reached < k) & (key < high)
    low = tl.where(up, key, low)
    at_low = tl.where(up, reached, at_low)
    high = tl.where(down, key, high)
    at_high = tl.where(down, reached, at_high)
    return low, at_low, high, at_high


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
def best(key, count, k, slack, SIZE: tl.constexpr):
    """(keep, place, kept, low) for the highest of `count` keys [SIZE]: k of them, the first of equal ones, or up to slack more.

    low: what all that are kept reach.
    """
    low = tl.full((), 1, tl.uint32)
    ties = tl.full((), SIZE, tl.int32)
    kept = count
    if count > k + slack:
        lowest, at_low, at_high = search(key, count, k, slack)
        low = lowest
        ties = tl.where(at_low <= k + slack, SIZE, k - at_high)
        kept = tl.where(at_low <= k + slack, at_low, k)
    keep, place = places(key, low, ties)
    return keep, place, kept, low


@triton.jit
def load_list(keys, indices, count, CAPACITY: tl.constexpr):
    """A list as (key, index) [CAPACITY]; key 0 beyond its end."""
    entry = tl.arange(0, CAPACITY)
    key = tl.load(keys + entry, mask=entry < count, other=0).to(tl.uint32, bitcast=True)
    return key, tl.load(indices + entry, mask=entry < count, other=0)


@triton.jit
def absorb(key, index, keys, indices, count, bar, k, SIZE: tl.constexpr, CAPACITY: tl.constexpr):
    """Appends the keys [SIZE] above the bar to a list and shrinks it where it is full; returns its (count, bar).

    What does not exceed the bar is not among the k best of what was absorbed. CAPACITY >= k + k // 4 + SIZE.
    """
    keep = key > bar
    place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(keys + place, key.to(tl.int32, bitcast=True), mask=keep)
    tl.store(indices + place, index, mask=keep)
    count += tl.sum(keep.to(tl.int32), 0)
    if count > CAPACITY - SIZE:
        tl.debug_barrier()
        all_keys, all_indices = load_list(keys, indices, count, CAPACITY)
        stays, to, kept, low = best(all_keys, count, k, k // 4, CAPACITY)
        tl.debug_barrier()  # everybody has read before anybody writes
        tl.store(keys + to, all_keys.to(tl.int32, bitcast=True), mask=stays)
        tl.store(indices + to, all_indices, mask=stays)
        tl.debug_barrier()
        bar = tl.where(kept >= k, low, bar)
        count = kept
    return count, bar


@triton.jit
def members(source, n, chosen, groups, bar, keys, indices, k, FLOAT: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
            CAPACITY: tl.constexpr):  # fmt: skip
    """(key, index) [CAPACITY] of the entries of chosen groups of GROUP that exceed `bar` and hold the k best of them, in order.

    key 0 = none. chosen [groups], rising; an entry is live below n; keys, indices: scratch of CAPACITY int32.
    """
    total = groups * GROUP
    if total <= CAPACITY:
        member = tl.arange(0, CAPACITY)
        group = tl.load(chosen + member // GROUP, mask=member < total, other=0)
        index = group * GROUP + member % GROUP
        key = load_keys(source, index, (member < total) & (index < n), FLOAT)
        key = tl.where(key > bar, key, 0)
    else:
        count = tl.zeros((), tl.int32)
        for start in tl.range(0, total, SIZE, num_stages=1):
            member = start + tl.arange(0, SIZE)
            group = tl.load(chosen + member // GROUP, mask=member < total, other=0)
            some = group * GROUP + member % GROUP
            some_keys = load_keys(source, some, (member < total) & (some < n), FLOAT)
            count, bar = absorb(some_keys, some, keys, indices, count, bar, k, SIZE, CAPACITY)
        tl.debug_barrier()
        key, index = load_list(keys, indices, count, CAPACITY)
    tl.debug_barrier()  # the scratch may be used again
    return key, index


@triton.jit
def candidates(source, n, maxima, chosen, keys, indices, k, FLOAT: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
               CAPACITY: tl.constexpr):  # fmt: skip
    """(key, index) [CAPACITY] of entries that hold the k best of `n`, in the order of their indices; key 0 = none.

    source: scores or keys [n]; maxima: keys [n / 8], read where n > CAPACITY; chosen, keys, indices: scratch of GROUPS,
    CAPACITY and CAPACITY int32.
    """
    if n <= CAPACITY:
        index = tl.arange(0, CAPACITY)
        key = load_keys(source, index, index < n, FLOAT)
    else:
        group = tl.arange(0, GROUPS)
        groups = (n + 7) // 8
        maximum = load_keys(maxima, group, group < groups, False)
        # A few more groups than k are found sooner; not more than one load of members holds.
        slack = tl.maximum(tl.minimum(k // 8, CAPACITY // 8 - k), 0)
        keep, place, kept, low = best(maximum, groups, k, slack, GROUPS)
        tl.store(chosen + place, group, mask=keep)
        tl.debug_barrier()
        key, index = members(source, n, chosen, kept, low - 1, keys, indices, k, FLOAT, 8, SIZE, CAPACITY)
    return key, index


@triton.jit
def side_by_side(source, n, keys, indices, k, SIZE: tl.constexpr, CAPACITY: tl.constexpr):
    """(key, index) [CAPACITY] of those of the keys source [n] that hold the k best, in order; key 0 = none or no entry."""
    if n <= CAPACITY:
        index = tl.arange(0, CAPACITY)
        key = load_keys(source, index, index < n, False)
    else:
        count = tl.zeros((), tl.int32)
        bar = tl.zeros((), tl.uint32)
        for start in tl.range(0, n, SIZE, num_stages=1):
            some = start + tl.arange(0, SIZE)
            some_keys = load_keys(source, some, some < n, False)
            count, bar = absorb(some_keys, some, keys, indices, count, bar, k, SIZE, CAPACITY)
        tl.debug_barrier()
        key, index = load_list(keys, indices, count, CAPACITY)
    return key, index
