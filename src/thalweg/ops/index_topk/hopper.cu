// Selection of index_topk on Hopper, from what mqa_logits/hopper.cu leaves of the scores.
//
// Grid: rows, or rows times a cluster of blocks where rows are few, which only long rows use. A block brings keys to its shared
// memory and selects there (topk/hopper.cuh): all keys of a short row; else the maxima of groups of 8, and then the keys of the best
// groups. A row up to DENSE entries has its keys in scratch; of a longer one the blocks of the cluster score the entries of the
// chosen groups again, on tensor cores.
#include "mqa_logits/hopper.cuh"
#include "topk/hopper.cuh"

constexpr int GROUP = 8;
constexpr int MOST_GROUPS = CAPACITY / GROUP;
constexpr int NEAR_PAGES = DENSE / TILE;  // whose ids are read early
constexpr int TEAMS = THREADS / MATH;     // that score

struct Shared {
    Selection selection;
    alignas(1024) u8 tiles[TEAMS][TILE * WIDTH];
    u8 queries[HEAD_COUNT * WIDTH];
    float weight[HEAD_COUNT];
    int groups[MOST_GROUPS], places[MOST], pages[NEAR_PAGES];
};
static_assert(sizeof(Shared) <= SHARED, "the launch gives less");

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(memory); }

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ __forceinline__ void cluster_barrier() {
    __threadfence();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Of four keys side by side those of `live` entries that reach `bar`.
__device__ __forceinline__ uint4 reaching(uint4 four, int live, u32 bar) {
    if (live < 1 || four.x < bar) four.x = 0;
    if (live < 2 || four.y < bar) four.y = 0;
    if (live < 3 || four.z < bar) four.z = 0;
    if (live < 4 || four.w < bar) four.w = 0;
    return four;
}

constexpr int FOURS = 4;  // loads of a thread in flight: none waits for another, so that none is in a branch

// keys [n], n > 0, to shared memory, and their highest to s.selection. A barrier follows.
__device__ __noinline__ void bring(const u32* source, int n) {
    Shared& s = shared();
    u32 highest = 0;
    for (int begin = threadIdx.x * 4; begin < n; begin += FOURS * THREADS * 4) {
        uint4 four[FOURS];
#pragma unroll
        for (int j = 0; j < FOURS; ++j)
            four[j] = __ldcg(reinterpret_cast<const uint4*>(source + min(begin + j * THREADS * 4, (n - 1) & ~3)));
#pragma unroll
        for (int j = 0; j < FOURS; ++j) {
            int i = begin + j * THREADS * 4;
            if (i >= n) break;
            four[j] = reaching(four[j], n - i, 1);
            *reinterpret_cast<uint4*>(s.selection.keys + i) = four[j];
            highest = max(max(highest, max(four[j].x, four[j].y)), max(four[j].z, four[j].w));
        }
    }
    raise_highest(highest);
}

// The keys of `count` groups that reach `bar` to shared memory, of a row of `length` entries; by_place: they lie in the order of the
// groups' places. A barrier follows.
__device__ __noinline__ void bring_groups(const u32* source, int count, int length, u32 bar, bool by_place) {
    Shared& s = shared();
    for (int begin = threadIdx.x; begin < count * 2; begin += FOURS * THREADS) {
        uint4 four[FOURS];
        int first[FOURS];
#pragma unroll
        for (int j = 0; j < FOURS; ++j) {
            int i = min(begin + j * THREADS, count * 2 - 1);
            first[j] = s.groups[i / 2] * GROUP + i % 2 * 4;
            four[j] = __ldcg(reinterpret_cast<const uint4*>(source + (by_place ? i * 4 : first[j])));
        }
#pragma unroll
        for (int j = 0; j < FOURS; ++j) {
            int i = begin + j * THREADS;
            if (i < count * 2) *reinterpret_cast<uint4*>(s.selection.keys + i * 4) = reaching(four[j], length - first[j], bar);
        }
    }
}

// Scores the entries of `count` groups again, by all blocks of the cluster, and leaves their keys in `out` in the order of the
// groups' places. Inline: across a call the assembler would make its products wait for one another.
__device__ __forceinline__ void score_again(const u8* keys, const float* scales, const u8* q, const float* weights,
                                            const int* table, u32* out, int row, int count, int length, int heads, int pool,
                                            int page_keys, i64 q_row, i64 q_head, i64 page_stride, i64 scale_stride) {
    Shared& s = shared();
    int rank = cluster_rank(), blocks = cluster_size(), team = threadIdx.x / MATH, mate = threadIdx.x % MATH;
    if (team == 0) load_queries<1, HEAD_COUNT>(s.queries, s.weight, q, weights, row, 1, heads, q_row, q_head, mate, MATH);
    fence_for_async();
    if (blocks > 1) cluster_barrier();  // everybody has read the maxima, which lie there
    else __syncthreads();
    u8* tile = s.tiles[team];
    float own[HEAD_COUNT / 4];
    own_weights<HEAD_COUNT>(own, s.weight, mate);
    for (int t = team * blocks + rank; t * TILE < count * GROUP; t += TEAMS * blocks) {
        named_barrier(1 + team, MATH);  // the tile before has been read
#pragma unroll
        for (int chunk = mate; chunk < TILE * 8; chunk += MATH) {
            int r = chunk / 8, c = chunk % 8, place = t * (TILE / GROUP) + r / GROUP;
            uint4 codes = make_uint4(0, 0, 0, 0);
            if (place < count) {
                int entry = s.groups[place] * GROUP + r % GROUP, page = entry < length ? table[entry / page_keys] : -1;
                if (page >= 0 && page < pool)
                    codes = *reinterpret_cast<const uint4*>(keys + page * page_stride + entry % page_keys * WIDTH + c * 16);
            }
            *reinterpret_cast<uint4*>(tile + r * WIDTH + ((c ^ (r % 8)) * 16)) = codes;
        }
        int r = own_key(mate), place = t * (TILE / GROUP) + r / GROUP;
        int entry = place < count ? s.groups[place] * GROUP + r % GROUP : length;
        int page = entry < length ? table[entry / page_keys] : -1;
        bool there = page >= 0 && page < pool;
        float scale = there ? scales[page * scale_stride + entry % page_keys] : 0.0f;
        fence_for_async();
        named_barrier(1 + team, MATH);
        float sums[HEAD_COUNT / 2], upper, lower;
        multiply<HEAD_COUNT>(sums, tile, s.queries);
        sum_heads<HEAD_COUNT>(upper, lower, sums, own);
        float score = across(upper, lower, mate) * scale;
        if (place < count && (mate & 2) == 0) out[t * TILE + r] = entry < length ? to_key(there ? score : minus_infinity()) : 0;
    }
    if (blocks > 1) cluster_barrier();
    else __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_kernel(const u8* keys, const float* scales, const u8* q, const float* weights, const int* lengths, const int* pages,
                  const int* row_to_request, u32* scores, int* out_indices, int* out_slots, int requests,
                  int heads, int span, int pool, int page_keys, int page_slots, int k, i64 q_row, i64 q_head, i64 page_stride,
                  i64 scale_stride, i64 table_stride) {
    Shared& s = shared();
    int thread = threadIdx.x, rank = cluster_rank(), blocks = cluster_size(), row = blockIdx.x / blocks;
    selection_begin();
    int request = row_to_request == nullptr ? row : row_to_request[row];
    bool known = request >= 0 && request < requests;
    int length = known ? min(max(lengths[row], 0), span) : 0;
    bool near = length <= DENSE;
    if (rank > 0 && near) return;
    const int* table = pages + (known ? request : 0) * table_stride;
    u32 *dense = scores + i64(row) * (DENSE + DENSE / GROUP), *maxima = dense + DENSE;
    if (near)
        for (int page = thread; page * page_keys < length; page += THREADS) copy_word(&s.pages[page], table + page);
    __syncthreads();
    int count = (length + GROUP - 1) / GROUP;  // of groups
    bool grouped = length > ALONE && count > k;
    if (length > k) {
        int n = grouped ? count : length;
        bring(near && grouped ? maxima : dense, n);
        __syncthreads();
        u32 bar = guess_below(k);
        for (bool groups = grouped;; groups = false) {
            int slack = !groups ? 0 : min(near ? k : k / 8, MOST_GROUPS - k);
            Threshold t = threshold(n, k, slack, bar, s.selection.highest);
            keep(n, t, shared_address(groups ? s.groups : s.places));
            __syncthreads();
            if (!groups) break;
            count = t.kept;
            bar = t.low;
            n = count * GROUP;
            if (!near) {
                score_again(keys, scales, q, weights, table, dense, row, count, length, heads, pool, page_keys, q_row, q_head,
                            page_stride, scale_stride);
                if (rank > 0) return;
            }
            bring_groups(dense, count, length, bar, !near);
            __syncthreads();
        }
    }
    copies_wait();
    __syncthreads();
    for (int place = thread; place < k; place += THREADS) {
        int index = place < length ? place : -1, slot = -1;
        if (length > k) {
            index = s.places[place];
            if (grouped) index = s.groups[index / GROUP] * GROUP + index % GROUP;
        }
        if (index >= 0) {
            int page = near ? s.pages[index / page_keys] : table[index / page_keys];
            if (page >= 0 && page < pool) slot = int(i64(page) * page_slots + index % page_keys);
        }
        out_indices[i64(row) * k + place] = index;
        out_slots[i64(row) * k + place] = slot;
    }
}
