// Exact selection over given scores on Hopper.
//
// Grid: rows times a cluster of up to 8 blocks, more where rows are few. Each block of a cluster takes an equal stretch of the row,
// CAPACITY scores at a time in shared memory, and carries the k best of what it has seen; the first block selects among what all
// have found, which they store to its shared memory.
#include "topk/hopper.cuh"

struct Shared {
    Selection selection;
    int places[MOST], carried[MOST];  // numbers of keys; indices of those carried, which are the first keys
};
static_assert(sizeof(Shared) <= SHARED, "the launch gives less");

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores to the same place of the shared memory of the cluster's first block.
__device__ __forceinline__ void store_to_first(void* to, u32 value) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, 0;\nst.shared::cluster.b32 [there], %1;\n}\n" ::"r"(
            shared_address(to)),
        "r"(value)
        : "memory");
}

// Makes it the highest of what is there and `value`.
__device__ __forceinline__ void raise_in_first(u32* to, u32 value) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, 0;\nred.shared::cluster.max.u32 [there], %1;\n}\n" ::"r"(
            shared_address(to)),
        "r"(value)
        : "memory");
}

// Keys of scores [n], and the highest of them.
__device__ __forceinline__ u32 load_keys(u32* keys, const float* scores, int n) {
    u32 highest = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < n; i += THREADS) {
        u32 key = to_key(scores[i]);
        keys[i] = key;
        highest = max(highest, key);
    }
    return highest;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    topk_kernel(const float* logits, const int* lengths, int* out, int span, int k, i64 stride) {
    Shared& s = *reinterpret_cast<Shared*>(memory);
    u32 rank, blocks;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    int thread = threadIdx.x, row = blockIdx.x / blocks;
    selection_begin();
    int n = min(max(lengths[row], 0), span);
    bool together = blocks > 1 && n > ALONE;
    if (rank > 0 && !together) return;
    const float* scores = logits + row * stride;
    out += i64(row) * k;
    if (n <= k) {
        for (int place = thread; place < k; place += THREADS) out[place] = place < n ? place : -1;
        return;
    }
    __syncthreads();
    int share = together ? (n + blocks - 1) / blocks : n;
    int from = min(n, int(rank) * share), end = min(n, from + share), carried = 0;
    while (true) {
        int more = min(end - from, CAPACITY - carried), held = carried + more;
        raise_highest(load_keys(s.selection.keys + carried, scores + from, more));
        __syncthreads();
        bool last = from + more == end;
        int kept = min(held, k);
        if (held > k) {
            Threshold t = threshold(held, k, 0, guess_below(k), s.selection.highest);
            keep(held, t, shared_address(s.places));
        } else {
            for (int place = thread; place < held; place += THREADS) s.places[place] = place;
        }
        __syncthreads();
        constexpr int OWN = MOST / THREADS;
        u32 key[OWN];
        int index[OWN];
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            int place = thread + j * THREADS, number = place < kept ? s.places[place] : 0;
            index[j] = number < carried ? s.carried[number] : from + number - carried;
            key[j] = s.selection.keys[number];
        }
        __syncthreads();  // everybody has read before anybody writes
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            int place = thread + j * THREADS;
            if (place >= kept) continue;
            if (last && !together) out[place] = index[j];
            s.selection.keys[place] = key[j];
            s.carried[place] = index[j];
        }
        carried = kept;
        from += more;
        if (last) break;
        __syncthreads();
    }
    if (!together) return;
    cluster_barrier();  // the first block is there, and reads no more what it is sent
    int* found = reinterpret_cast<int*>(s.selection.keys + CAPACITY / 2);
    for (int place = thread; place < k; place += THREADS) {
        u32 key = place < carried ? s.selection.keys[place] : 0;
        int index = place < carried ? s.carried[place] : -1;
        if (rank > 0) {
            store_to_first(s.selection.keys + rank * k + place, key);
            store_to_first(found + rank * k + place, index);
        } else {
            if (place >= carried) s.selection.keys[place] = 0;
            found[place] = index;
        }
    }
    if (rank > 0 && thread == 0) raise_in_first(&s.selection.highest, s.selection.highest);
    cluster_barrier();
    if (rank > 0) return;
    Threshold t = threshold(int(blocks) * k, k, 0, guess_below(k), s.selection.highest);
    keep(int(blocks) * k, t, shared_address(s.places));
    __syncthreads();
    for (int place = thread; place < k; place += THREADS) out[place] = found[s.places[place]];
}
