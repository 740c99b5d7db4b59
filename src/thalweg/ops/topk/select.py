"""Exact selection of the k highest, in pieces that kernels share: `topk` over given scores, `index_topk` over its own.

Scores are compared as uint32 keys of the same order (NaN highest); key 0 is no entry. Two levels: of groups of
entries, the k with the highest maxima (of equal ones the first) hold all of the k best entries: an entry elsewhere has k
maxima before it. So a program reads the maxima, and then the members of k groups or a few more, of however many.
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
def _add(count, first, second, more, more_first, more_second):
    return count + more, first + more_first, second + more_second


@triton.jit
def _sums_at_once(count, first, second):
    return tl.reduce((count, first, second), 0, _add)


@triton.jit
def _sums_one_by_one(count, first, second):
    return tl.sum(count, 0), tl.sum(first, 0), tl.sum(second, 0)


# One pass through the program's threads for three sums; the interpreter takes seconds for a combination of our own.
_sums = _sums_one_by_one if triton.knobs.runtime.interpret else _sums_at_once


@triton.jit
def outset(key, k):
    """(count, low, high, deviation): how many keys there are, and keys on both sides of where the k-th highest score is if
    scores are normally distributed."""
    live = key != 0
    score = tl.where(live, to_score(key), 0.0)
    count, total, squares = _sums(live.to(tl.int32), score, score * score)
    share = 1.0 / tl.maximum(count, 1).to(tl.float32)
    mean = total * share
    deviation = tl.sqrt(tl.maximum(squares * share - mean * mean, 0.0))
    part = tl.minimum(share * k, 1.0)  # k may be a constant: Triton makes one of every argument that is 1
    tail = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.minimum(part, 1.0 - part), 1e-7)))
    # Abramowitz and Stegun 26.2.22.
    away = tail - (2.30753 + 0.27061 * tail) / (1.0 + 0.99229 * tail + 0.04481 * tail * tail)
    expected = mean + deviation * tl.where(part < 0.5, away, -away)
    return count, to_key(expected - 0.05 * deviation), to_key(expected + 0.05 * deviation), deviation


@triton.jit
def search(key, k, slack):
    """(low, count, at_low, at_high): at_low >= k of the count keys reach `low`, k + slack at most unless more than that are equal
    to the k-th; with count <= k + slack all do, and low is 1.

    Where more are equal, low is the k-th highest key itself and at_high < k keys are above it. key uint32 [N], N < 2^15, 0 =
    no entry. A round counts what reaches two keys of the range that is left: at first on both sides of where the k-th of a
    normal distribution is; while one end is unknown, ever farther from the other; then where it is if scores are spread
    evenly; and where that did not halve the entries in the range, the middles of keys and scores.
    """
    count, first, second, deviation = outset(key, k + slack // 2)
    low = tl.full((), 1, tl.uint32)
    high = tl.full((), 0xFFFFFFFF, tl.uint32)
    at_low = count
    at_high = count * 0
    step = deviation * 0.2
    begun = False
    while (at_low > k + slack) & (high - low > 1):
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, low + 1), high - 1)
        # Two counts of 16 bits stand in 32, so that one reduction sums them.
        sums = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16), 0)
        before = at_low - at_high
        low, at_low, high, at_high = narrow(low, at_low, high, at_high, first, sums & 0xFFFF, k)
        low, at_low, high, at_high = narrow(low, at_low, high, at_high, second, sums >> 16, k)
        inside = at_low - at_high
        halved = (inside * 2 <= before) | ~begun
        begun = True
        low_score = to_score(low)
        high_score = to_score(high)
        share = 1.0 / inside.to(tl.float32)
        expected = low_score + (high_score * share - low_score * share) * (at_low - k).to(tl.float32)
        spread = (high_score * share - low_score * share) * (1.0 + tl.sqrt(inside.to(tl.float32)) * 0.25)
        no_high = high == 0xFFFFFFFF
        no_low = low == 1
        near = tl.where(no_high, low_score + step, tl.where(no_low, high_score - 4.0 * step, expected - spread))
        far = tl.where(no_high, low_score + 4.0 * step, tl.where(no_low, high_score - step, expected + spread))
        step = tl.where(no_high | no_low, step * 8.0, step)
        first = tl.where(halved, to_key(near), low + (high - low) // 2)
        second = to_key(tl.where(halved, far, low_score * 0.5 + high_score * 0.5))
    return low, count, at_low, at_high


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
def best(key, k, slack, SIZE: tl.constexpr):
    """(keep, place, kept, low) for the highest keys [SIZE]: k of them, the first of equal ones, or up to slack more; all where
    there are no more.

    low: what all that are kept reach.
    """
    low, _count, at_low, at_high = search(key, k, slack)
    enough = at_low <= k + slack
    keep, place = places(key, low, tl.where(enough, SIZE, k - at_high))
    return keep, place, tl.where(enough, at_low, k), low


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
        stays, to, kept, low = best(all_keys, k, k // 4, CAPACITY)
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
def candidates(source, n, maxima, chosen, keys, indices, k, FLOAT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
               SIZE: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """(key, index) [CAPACITY] of entries that hold the k best of `n`, in the order of their indices; key 0 = none.

    source: scores or keys [n]; maxima: keys of groups of GROUP [n / GROUP], read where n > CAPACITY; chosen, keys, indices:
    scratch of GROUPS, CAPACITY and CAPACITY int32.
    """
    if n <= CAPACITY:
        index = tl.arange(0, CAPACITY)
        key = load_keys(source, index, index < n, FLOAT)
    else:
        group = tl.arange(0, GROUPS)
        groups = (n + GROUP - 1) // GROUP
        maximum = load_keys(maxima, group, group < groups, False)
        # A few more groups than k are found sooner; not more than one load of members holds.
        slack = tl.maximum(CAPACITY // GROUP - k, 0)
        keep, place, kept, low = best(maximum, k, slack, GROUPS)
        tl.store(chosen + place, group, mask=keep)
        tl.debug_barrier()
        key, index = members(source, n, chosen, kept, low - 1, keys, indices, k, FLOAT, GROUP, SIZE, CAPACITY)
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
