// Exact selection by one block of THREADS threads: the k highest of keys in its shared memory, in their order.
//
// Histograms of 2,048 bins narrow the range that holds the k-th key, each by eleven bits: one or two do where scores spread. Then
// each warp counts what is kept of a stretch of the keys, and writes it. A launch runs this once or twice, and would wait for its
// own instructions if they were many: loops stay loops, and a function is one piece of code however often it is called.
// Keys are u32 in the scores' order (device/hopper.cuh); 0 is no entry.
#pragma once
#include "device/hopper.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
constexpr int OWN_BINS = BINS / THREADS;
constexpr u32 EVERYBODY = 0xFFFFFFFFu;

struct Selection {
    u32 bins[2][BINS];  // by turns: one is used while the other is cleared
    u32 highest;
    int turn;
    int warp_sums[WARPS], equal_sums[WARPS];
    int bin, above, inside;
};

// What is wanted of keys: `kept` of them, those above `low` and the first `ties` of those equal to it.
struct Threshold {
    u32 low;
    int kept, ties;
};

// Before anything else; a barrier of the block follows.
__device__ __forceinline__ void selection_begin(Selection& s) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[0][i] = 0;
    if (threadIdx.x == 0) s.highest = s.turn = 0;
}

// Makes `highest` that of all threads' in s.highest, which begins at 0. A barrier follows.
__device__ __forceinline__ void raise_highest(Selection& s, u32 highest) {
    highest = __reduce_max_sync(EVERYBODY, highest);
    if (threadIdx.x % 32 == 0) atomicMax(&s.highest, highest);
}

// Where the k-th score may be at the lowest, if the highest is `high`: a guess that costs a histogram where it is wrong.
__device__ __forceinline__ u32 guess_below(u32 high) {
    float score = to_score(high);
    return score > 0.0f ? to_key(score * 0.0625f) : 1;
}

// The threshold of the k highest of keys [n], or of up to `slack` more. At least k are not 0, none is above `high`; the k-th may be
// at `low` at the lowest, or that is a guess.
__device__ __noinline__ Threshold threshold(Selection& s, const u32* keys, int n, int k, int slack, u32 low, u32 high) {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, found = 0, turn = s.turn;
    u32 floor = 1;
    while (true) {
        u32 range = high - low;
        int shift = max(0, 21 - __clz(range | 1));
        u32* bins = s.bins[turn];
#pragma unroll 4
        for (int i = thread; i < n; i += THREADS) {
            u32 above = keys[i] - low;
            if (above <= range) atomicAdd(&bins[above >> shift], 1);
        }
        turn ^= 1;
        for (int j = thread; j < BINS; j += THREADS) s.bins[turn][j] = 0;
        __syncthreads();
        int own = 0;
#pragma unroll
        for (int j = 0; j < OWN_BINS; ++j) own += bins[thread * OWN_BINS + j];
        int after = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_down_sync(EVERYBODY, after, step);
            if (lane + step < 32) after += other;
        }
        if (lane == 0) s.warp_sums[warp] = after;
        __syncthreads();
        int of_warp = lane < WARPS ? s.warp_sums[lane] : 0;
        after += __reduce_add_sync(EVERYBODY, lane > warp ? of_warp : 0);  // of this thread's bins and all higher ones
        int total = __reduce_add_sync(EVERYBODY, of_warp), wanted = k - found, above = after - own;
        if (total < wanted) {  // the k-th is below the guess
            found += total;
            high = low - 1;
            low = floor;
            __syncthreads();  // the sums may be written again
            continue;
        }
        if (after >= wanted && above < wanted) {
            int j = OWN_BINS - 1, inside = bins[thread * OWN_BINS + j];
            while (above + inside < wanted) {
                above += inside;
                inside = bins[thread * OWN_BINS + --j];
            }
            s.bin = thread * OWN_BINS + j;
            s.above = above;
            s.inside = inside;
        }
        __syncthreads();
        found += s.above;
        low += u32(s.bin) << shift;
        floor = low;
        high = low + min(high - low, (1u << shift) - 1);
        int inside = s.inside;
        bool few = found + inside <= k + slack;
        if (few || shift == 0) {
            if (thread == 0) s.turn = turn;
            return few ? Threshold{low, found + inside, inside} : Threshold{low, k, k - found};
        }
        __syncthreads();  // what was found may be written again
    }
}

// places[p] = the number of the p-th of the keys [n] that the threshold keeps, in their order. A barrier follows.
__device__ __noinline__ void keep(Selection& s, const u32* keys, int n, Threshold t, int* places) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int stretch = (n + THREADS - 1) / THREADS * 32, begin = warp * stretch, end = min(n, begin + stretch);
    // Above `low` and equal to it, counted in the halves of one number.
    int counts = 0;
#pragma unroll 4
    for (int i = begin + lane; i < end; i += 32) {
        u32 key = keys[i];
        counts += (key > t.low) + ((key == t.low) << 16);
    }
    int higher = __reduce_add_sync(EVERYBODY, counts & 0xFFFF), equal = __reduce_add_sync(EVERYBODY, counts >> 16);
    if (lane == 0) s.warp_sums[warp] = higher, s.equal_sums[warp] = equal;
    __syncthreads();
    bool before = lane < warp;
    int ties_before = __reduce_add_sync(EVERYBODY, before ? s.equal_sums[lane] : 0);
    int place = __reduce_add_sync(EVERYBODY, before ? s.warp_sums[lane] : 0) + min(ties_before, t.ties);
    int left = t.ties - min(ties_before, t.ties);
    u32 lower_lanes = (1u << lane) - 1;
    if (higher == 0 && (equal == 0 || left == 0)) return;
    for (int i = begin; i < end; i += 32) {
        u32 key = i + lane < end ? keys[i + lane] : 0;
        u32 ties = __ballot_sync(EVERYBODY, key == t.low);
        bool kept = key > t.low || (key == t.low && __popc(ties & lower_lanes) < left);
        u32 all = __ballot_sync(EVERYBODY, kept);
        if (kept) places[place + __popc(all & lower_lanes)] = i + lane;
        place += __popc(all);
        left = max(0, left - __popc(ties));
    }
}
