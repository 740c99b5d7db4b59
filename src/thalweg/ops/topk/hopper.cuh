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
constexpr int SIDE = 8;  // keys that a thread looks at together
constexpr u32 EVERYBODY = 0xFFFFFFFFu;

extern __shared__ __align__(1024) u8 memory[];

struct Selection {
    u32 keys[CAPACITY];
    u32 bins[2][BINS];  // by turns: one is used while the other is cleared
    u32 highest, likely, beside;  // beside: counts what is in no bin, and nobody reads it
    int turn;
    int warp_sums[WARPS];
    int bin, above, inside;
};

// Lies first in the block's shared memory.
__device__ __forceinline__ Selection& selection() { return *reinterpret_cast<Selection*>(memory); }

// What is wanted of keys: `kept` of them, those above `low` and the first `ties` of those equal to it.
struct Threshold {
    u32 low;
    int kept, ties;
};

// Before anything else; a barrier of the block follows.
__device__ __forceinline__ void selection_begin() {
    Selection& s = selection();
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[0][i] = 0;
    if (threadIdx.x == 0) s.highest = s.likely = s.turn = 0;
}

// Every thread gives the highest of its keys: s.highest, 0 before, becomes that of all. s.likely becomes what few keys do not exceed
// that are among THREADS highest: the highest of what all threads of a warp have above. A barrier follows.
__device__ __forceinline__ void raise_highest(u32 highest) {
    Selection& s = selection();
    u32 all = __reduce_max_sync(EVERYBODY, highest), everywhere = __reduce_min_sync(EVERYBODY, highest);
    if (threadIdx.x % 32 == 0) {
        atomicMax(&s.highest, all);
        atomicMax(&s.likely, everywhere);
    }
}

// Where the k-th score may be at the lowest: a guess that costs a histogram where it is wrong.
__device__ __forceinline__ u32 guess_below(int k) {
    Selection& s = selection();
    if (k <= THREADS && s.likely > 0) return s.likely;
    float score = to_score(s.highest);
    return score > 0.0f ? to_key(score * 0.0625f) : 1;
}

// SIDE keys side by side; 0 from the n-th on. All are loaded before one is used.
__device__ __forceinline__ void load_side(u32 (&key)[SIDE], int first, int n) {
    Selection& s = selection();
#pragma unroll
    for (int c = 0; c < SIDE; c += 4) {
        uint4 four = *reinterpret_cast<const uint4*>(s.keys + (first + c < n ? first + c : 0));
        key[c] = four.x, key[c + 1] = four.y, key[c + 2] = four.z, key[c + 3] = four.w;
    }
#pragma unroll
    for (int c = 0; c < SIDE; ++c)
        if (first + c >= n) key[c] = 0;
}

// The threshold of the k highest of the first n keys, or of up to `slack` more. At least k are not 0, none is above `high`; the k-th may be
// at `low` at the lowest, or that is a guess.
__device__ __noinline__ Threshold threshold(int n, int k, int slack, u32 low, u32 high) {
    Selection& s = selection();
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, found = 0, turn = s.turn;
    u32 floor = 1;
    while (true) {
        u32 range = high - low;
        int shift = max(0, 21 - __clz(range | 1));
        u32* bins = s.bins[turn];
        for (int first = thread * SIDE; first < n; first += THREADS * SIDE) {
            u32 key[SIDE];
            load_side(key, first, n);
#pragma unroll
            for (int c = 0; c < SIDE; ++c) {  // without a branch, which would keep the next waiting
                u32 above = key[c] - low;
                atomicAdd(above <= range ? &bins[above >> shift] : &s.beside, 1);
            }
        }
        turn ^= 1;
#pragma unroll
        for (int j = 0; j < OWN_BINS; ++j) s.bins[turn][thread * OWN_BINS + j] = 0;
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

// The word p of the shared address `places` becomes the number of the p-th of the first n keys that the threshold keeps, in
// their order. A barrier follows.
__device__ __noinline__ void keep(int n, Threshold t, u32 places) {
    Selection& s = selection();
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, before = 0;  // kept, and equal to `low` in the upper half
    for (int first = thread * SIDE; first - thread * SIDE < n; first += THREADS * SIDE) {
        u32 higher = 0, equal = 0;
        u32 key[SIDE];
        load_side(key, first, n);
#pragma unroll
        for (int c = 0; c < SIDE; ++c) {
            higher |= u32(key[c] > t.low) << c;
            equal |= u32(key[c] == t.low) << c;
        }
        int own = __popc(higher) + (__popc(equal) << 16), up_to = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(EVERYBODY, up_to, step);
            if (lane >= step) up_to += other;
        }
        if (lane == 31) s.warp_sums[warp] = up_to;
        __syncthreads();
        int of_warp = lane < WARPS ? s.warp_sums[lane] : 0;
        int mine = before + up_to - own + __reduce_add_sync(EVERYBODY, lane < warp ? of_warp : 0);
        before += __reduce_add_sync(EVERYBODY, of_warp);
        int ties = mine >> 16, place = (mine & 0xFFFF) + min(ties, t.ties);
        for (u32 left = higher | equal; left != 0; left &= left - 1) {
            u32 bit = left & -left;
            if ((bit & higher) || ties++ < t.ties) store_word(places + 4 * place++, first + 31 - __clz(bit));
        }
        if (first - thread * SIDE + THREADS * SIDE < n) __syncthreads();  // the sums may be written again
    }
}
