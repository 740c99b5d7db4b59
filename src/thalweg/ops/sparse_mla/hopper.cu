// Attention over index lists on Hopper, v4 rows: lists divided into splits, each an online softmax over tiles of cached rows.
//
// Grid: (rows x tiles of 64 heads, splits). A block owns 64 heads of one row (padded) and an equal share of the tiles of 64 entries that
// the row's lists really have, the second cache's after the first's. Two teams of 128 threads bring cached rows, decode them to bf16
// in registers, and leave them in shared memory, a tile ahead (2 x 64 KiB). Two teams multiply by wgmma: the first makes the scores
// and weights of a tile; both add to their half of the 64 x 512 sums, which stay in registers (128 a thread).
#include "device/hopper.cuh"

constexpr int TEAM = 128;
constexpr int THREADS = 4 * TEAM;
constexpr int TILE = 64;       // entries, and heads
constexpr int CHANNELS = 512;  // of a query, a key and a value
constexpr int BLOCK = TILE * 128;                  // bytes of 64 rows x 64 channels of bf16, in the 128-byte swizzle
constexpr int BLOCKS = CHANNELS / 64;
constexpr int SLOT = 576;      // bytes of a slot's data: 448 codes of e4m3, 64 channels of bf16
constexpr int CHUNKS = 36;     // of 16 bytes: 28 of codes
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr u32 EVERYBODY = 0xFFFFFFFFu;

// One of the two lists of a row, and its cache.
struct List {
    const u8* cache;
    const int* indices;
    i64 page_stride;
    int length, pool, page;
};

struct Shared {
    u8 queries[BLOCKS][BLOCK];
    u8 keys[2][BLOCKS][BLOCK];
    u8 weights[2][BLOCK];          // bf16 [heads, entries]
    float bound[4][TILE];          // of an entry's scores: -inf where it is none, else NaN, which fminf passes over
    float decay[2][TILE];          // of a head's sums
    float share[TILE];             // of a head's sums in the result
    List lists[2];
    int main_tiles, first, last;  // tiles of the first list, and the block's of both
    u64 keys_full[2], keys_free[2], weights_full[2], weights_free[2];
};
static_assert(sizeof(Shared) <= SHARED, "the launch gives less");

__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// threadIdx.x, read again where it is wanted: no register keeps it through the loop.
__device__ __forceinline__ u32 thread_again() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// ---- cached rows -------------------------------------------------------------------------------------------------------------------

// Rows are brought by 8 lanes each: chunks lane, lane + 8, ... of their 36. The 64 rows of a tile are two halves for 256 threads.

// The index at a row of a tile, as it is listed; -1 behind the list's end.
__device__ __forceinline__ int slot_of(const Shared& s, int tile, u32 row) {
    int second = tile >= s.main_tiles;
    const List& list = s.lists[second];
    int entry = (tile - second * s.main_tiles) * TILE + int(row);
    return tile < s.last && entry < list.length ? __ldg(list.indices + entry) : -1;
}

// A cached row: its data, and the scales of its seven groups of 64 codes, a byte each. Null, and 0: none.
struct Row {
    const uint4* data;
    u64 scales;
};

__device__ __forceinline__ Row row_at(const Shared& s, int tile, int slot) {
    if (slot < 0) return {nullptr, 0};
    const List& list = s.lists[tile >= s.main_tiles];
    if (slot >= list.pool) return {nullptr, 0};
    u32 page = u32(slot) / u32(list.page), in_page = u32(slot) - page * u32(list.page);
    const u8* at = list.cache + page * list.page_stride;
    return {reinterpret_cast<const uint4*>(at + in_page * SLOT),
            __ldg(reinterpret_cast<const u64*>(at + i64(list.page) * SLOT) + in_page)};
}

__device__ __forceinline__ float bound_of(Row row) {
    return row.data != nullptr ? __uint_as_float(0x7FC00000u) : minus_infinity();
}

__device__ __forceinline__ uint4 load_chunk(Row row, u32 c) {
    return row.data != nullptr && c < CHUNKS ? __ldg(row.data + c) : make_uint4(0, 0, 0, 0);
}

// Two codes of e4m3 times a power of two as two of bf16: exact.
__device__ __forceinline__ u32 decode_two(u32 codes, float scale) {
    u32 halves, result;
    asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}\n" : "=r"(halves) : "r"(codes));
    float low, high;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
        : "=f"(low), "=f"(high)
        : "r"(halves));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high * scale), "f"(low * scale));
    return result;
}

__device__ __forceinline__ uint4 decode_eight(u32 first, u32 second, float scale) {
    return make_uint4(decode_two(first & 0xFFFF, scale), decode_two(first >> 16, scale), decode_two(second & 0xFFFF, scale),
                      decode_two(second >> 16, scale));
}

__device__ __forceinline__ float power_of(u32 code) {  // ue8m0: 0 is 2^-127, 255 is NaN
    return __uint_as_float(code == 255 ? 0x7FC00000u : code == 0 ? 0x00400000u : code << 23);
}

// Brings the block's tiles: as one half of a tile has been decoded, the same half of the next is asked for, and nothing that was asked
// for is looked at before the tile has been handed over. By two teams.
__device__ __forceinline__ void bring(Shared& s) {
    uint4 chunk[2][5];
    u64 scales[2];
    int slot[2];  // of the next tile's rows, known a tile before they are needed
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 thread = threadIdx.x - 2 * TEAM, row = thread / 8 + 32 * half, lane = thread % 8;
        Row own = row_at(s, s.first, slot_of(s, s.first, row));
        slot[half] = slot_of(s, s.first + 1, row);
        scales[half] = own.scales;
        if (lane == 0) s.bound[0][row] = bound_of(own);
#pragma unroll
        for (int i = 0; i < 5; ++i) chunk[half][i] = load_chunk(own, lane + 8 * i);
    }
    u32 tiles = s.last - s.first;
#pragma unroll 1
    for (u32 n = 0; n < tiles; ++n) {
        u32 buffer = n % 2;
        if (n >= 2) barrier_wait(&s.keys_free[buffer], n / 2 - 1 & 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 thread = thread_again() - 2 * TEAM, row = thread / 8 + 32 * half, lane = thread % 8;
            // Chunk lane + 8 i of codes is 16 channels of block lane / 4 + 2 i; from chunk 28 on there are no codes: each lane has one.
            u8* codes_to = s.keys[buffer][lane / 4] + chunk_at(row, lane % 4 * 2);
            u8* more_codes_to = s.keys[buffer][lane / 4] + chunk_at(row, lane % 4 * 2 + 1);
            u8* rest_to = s.keys[buffer][BLOCKS - 1] + chunk_at(row, lane ^ 4);
            u64 own_scales = scales[half] >> (lane / 4 * 8);
#pragma unroll
            for (int i = 0; i < 5; ++i) {
                uint4 own = chunk[half][i];
                if (i < 3 || (i == 3 && lane < 4)) {
                    float scale = power_of(u32(own_scales >> (16 * i)) & 0xFF);
                    *reinterpret_cast<uint4*>(codes_to + 2 * i * BLOCK) = decode_eight(own.x, own.y, scale);
                    *reinterpret_cast<uint4*>(more_codes_to + 2 * i * BLOCK) = decode_eight(own.z, own.w, scale);
                } else if (i == 3 || lane < 4) {
                    *reinterpret_cast<uint4*>(rest_to) = own;
                }
            }
            if (half == 1) {
                fence_for_async();
                barrier_arrive(&s.keys_full[buffer]);
            }
            Row next = row_at(s, s.first + n + 1, slot[half]);
            slot[half] = slot_of(s, s.first + n + 2, row);
            scales[half] = next.scales;
            if (lane == 0) s.bound[(n + 1) % 4][row] = bound_of(next);  // tile n - 3 is done with it
#pragma unroll
            for (int i = 0; i < 5; ++i) chunk[half][i] = load_chunk(next, lane + 8 * i);
        }
    }
}

// ---- products ----------------------------------------------------------------------------------------------------------------------

// scores [64, 64] (+)= a [64, 16] x b [64, 16]^T in bf16; columns as product_e4m3 has them.
__device__ __forceinline__ void product_scores(float (&sums)[32], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, add, 1, 1, 0, 0;\n}\n"
                 : REGISTERS_32(sums, 0)
                 : "l"(a), "l"(b), "r"(int(add)));
}

// sums [64, 128] += a [64, 16] x b [16, 128] in bf16: b's rows are entries, as the keys lie.
__device__ __forceinline__ void product_values(float (&sums)[64], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, 1, 1, 1, 0, 1;\n"
                 : REGISTERS_64(sums, 0)
                 : "l"(a), "l"(b));
}

// An operand of rows along the sum: blocks of 64 columns BLOCK bytes apart, 8 rows 1,024 bytes.
__device__ __forceinline__ u64 operand_by_rows(const void* rows) {
    return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(BLOCK >> 4) << 16) | ((shared_address(rows) & 0x3FFFF) >> 4);
}

// Adds a tile's weighted values to this team's half of the sums, decayed first.
__device__ __forceinline__ void add_values(float (&sums)[2][64], Shared& s, u32 buffer, int half, float upper, float lower) {
    if (__any_sync(EVERYBODY, upper != 1.0f || lower != 1.0f)) {
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[part][i] *= i % 4 < 2 ? upper : lower;
    }
    u64 a = operand(s.weights[buffer]), b = operand_by_rows(s.keys[buffer][half * BLOCKS / 2]);
    products_begin();
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) {
        u64 from = b + step * (2048 >> 4);
        product_values(sums[0], a + 2 * step, from);
        product_values(sums[1], a + 2 * step, from + (2 * BLOCK >> 4));
    }
    products_wait();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.keys_free[buffer]);
}

__device__ __forceinline__ float power(float exponent) {  // of 2
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

// Of a thread's two heads the first; the other is 8 below.
__device__ __forceinline__ u32 own_head(u32 mate) { return mate / 32 * 16 + mate % 32 / 4; }

// Scores and weights of a tile, by the first team; returns the decay of its rows' sums so far. top, total: of both its rows.
__device__ __forceinline__ void weigh(Shared& s, u32 n, float scale, float (&top)[2], float (&total)[2], float (&decay)[2]) {
    u32 buffer = n % 2;
    float scores[32];
    products_begin();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        u64 a = operand(s.queries[block]), b = operand(s.keys[buffer][block]);
#pragma unroll
        for (int step = 0; step < 4; ++step) product_scores(scores, a + 2 * step, b + 2 * step, block + step > 0);
    }
    products_wait();
    u32 thread = thread_again(), row = own_head(thread), quad = thread % 4;
    float highest[2] = {top[0], top[1]};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float2 bound = *reinterpret_cast<const float2*>(s.bound[n % 4] + 8 * j + 2 * quad);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scores[4 * j + 2 * r] = fminf(scores[4 * j + 2 * r] * scale, bound.x);
            scores[4 * j + 2 * r + 1] = fminf(scores[4 * j + 2 * r + 1] * scale, bound.y);
            highest[r] = fmaxf(highest[r], fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
        }
    }
    float safe[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        highest[r] = fmaxf(highest[r], __shfl_xor_sync(EVERYBODY, highest[r], 1));
        highest[r] = fmaxf(highest[r], __shfl_xor_sync(EVERYBODY, highest[r], 2));
        safe[r] = highest[r] == minus_infinity() ? 0.0f : highest[r];  // -inf minus itself is NaN
        decay[r] = power(top[r] - safe[r]);
        top[r] = highest[r];
        total[r] *= decay[r];
    }
    if (n >= 2) barrier_wait(&s.weights_free[buffer], n / 2 - 1 & 1);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float first = power(scores[4 * j + 2 * r] - safe[r]), second = power(scores[4 * j + 2 * r + 1] - safe[r]);
            total[r] += first + second;
            u32 two;
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
            *reinterpret_cast<u32*>(s.weights[buffer] + chunk_at(row + 8 * r, j) + 4 * quad) = two;
        }
    if (quad == 0) s.decay[buffer][row] = decay[0], s.decay[buffer][row + 8] = decay[1];
    fence_for_async();
    barrier_arrive(&s.weights_full[buffer]);
    named_barrier(1, TEAM);
}

template <typename Out>
__device__ __forceinline__ void store_two(Out* to, float first, float second);
template <>
__device__ __forceinline__ void store_two(float* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
}
template <>
__device__ __forceinline__ void store_two(u16* to, float first, float second) {
    asm volatile("{\n.reg .b32 two;\ncvt.rn.bf16x2.f32 two, %1, %2;\nst.global.b32 [%0], two;\n}\n" ::"l"(to), "f"(second), "f"(first)
                 : "memory");
}

__device__ __forceinline__ List list_of(const u8* cache, const int* indices, const int* lengths, int row, int width, int pool, int page,
                                        i64 page_stride, i64 list_row) {
    int length = max(width, 0);
    if (lengths != nullptr) length = min(max(lengths[row], 0), length);
    return {cache, indices + row * list_row, page_stride, length, pool, page};
}

using Out = OUT;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_kernel(const u8* q, const float* sink, Out* out, float* lse, const u8* cache, const int* indices, const int* lengths,
                  const u8* extra_cache, const int* extra_indices, const int* extra_lengths, int heads, int head_tiles, int width,
                  int pool, int page, int extra_width, int extra_pool, int extra_page, i64 q_row, i64 q_head, i64 page_stride,
                  i64 list_row, i64 extra_page_stride, i64 extra_list_row, float scale) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int thread = threadIdx.x, team = thread / TEAM, split = blockIdx.y, splits = gridDim.y;
    u32 row = blockIdx.x / u32(head_tiles), head = blockIdx.x % u32(head_tiles) * TILE;
    if (thread < 2) {
        barrier_init(&s.keys_full[thread], 2 * TEAM);
        barrier_init(&s.keys_free[thread], 2 * TEAM / 32);
        barrier_init(&s.weights_full[thread], TEAM);
        barrier_init(&s.weights_free[thread], TEAM / 32);
    }
    List main = list_of(cache, indices, lengths, row, width, pool, page, page_stride, list_row);
    List extra = list_of(extra_cache, extra_indices, extra_lengths, row, extra_width, extra_pool, extra_page, extra_page_stride,
                         extra_list_row);
    int main_tiles = (main.length + TILE - 1) / TILE, every = main_tiles + (extra.length + TILE - 1) / TILE;
    if (thread == 0) {
        s.lists[0] = main, s.lists[1] = extra, s.main_tiles = main_tiles;
        s.first = int(i64(every) * split / splits), s.last = int(i64(every) * (split + 1) / splits);
    }
    __syncthreads();
    if (team >= 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (s.first < s.last) bring(s);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    u32 tiles_here = s.last - s.first;
    if (tiles_here > 0) {  // queries: 64 chunks of 16 bytes a head
#pragma unroll 8
        for (int i = thread; i < TILE * 64; i += 2 * TEAM) {
            int h = i / 64, c = i % 64;
            uint4 chunk = make_uint4(0, 0, 0, 0);
            if (head + h < heads) chunk = __ldg(reinterpret_cast<const uint4*>(q + row * q_row + (head + h) * q_head) + c);
            *reinterpret_cast<uint4*>(s.queries[c / 8] + chunk_at(h, c % 8)) = chunk;
        }
    }
    fence_for_async();
    named_barrier(2, 2 * TEAM);
    float sums[2][64];  // of 128 channels each
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.0f;
    if (team == 0) {
        float top[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f}, decay[2];
#pragma unroll 1
        for (u32 n = 0; n < tiles_here; ++n) {
            barrier_wait(&s.keys_full[n % 2], n / 2 & 1);
            weigh(s, n, scale, top, total, decay);
            add_values(sums, s, n % 2, 0, decay[0], decay[1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            total[r] += __shfl_xor_sync(EVERYBODY, total[r], 1);
            total[r] += __shfl_xor_sync(EVERYBODY, total[r], 2);
            u32 mate = thread_again(), h = own_head(mate) + 8 * r;
            if (mate % 4 == 0) {
                float below = total[r];
                if (!SPLIT && sink != nullptr && head + h < heads) {
                    float safe = top[r] == minus_infinity() ? 0.0f : top[r];
                    below += power(sink[head + h] * LOG2E - safe);
                }
                s.share[h] = total[r] == 0.0f ? 0.0f : 1.0f / below;
                if (head + h < heads) lse[(i64(row) * splits + split) * heads + head + h] = (top[r] + log2f(total[r])) * (SPLIT ? 1.0f : LN2);
            }
        }
    } else {
#pragma unroll 1
        for (u32 n = 0; n < tiles_here; ++n) {
            u32 buffer = n % 2, mate = thread_again() % TEAM, own = own_head(mate);
            barrier_wait(&s.keys_full[buffer], n / 2 & 1);
            barrier_wait(&s.weights_full[buffer], n / 2 & 1);
            add_values(sums, s, buffer, 1, s.decay[buffer][own], s.decay[buffer][own + 8]);
            if (mate % 32 == 0) barrier_arrive(&s.weights_free[buffer]);
        }
    }
    named_barrier(2, 2 * TEAM);
    if (SPLIT && tiles_here == 0) return;  // only the log-sum-exp is written, which says so
    u32 mate = thread_again() % TEAM;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        u32 h = own_head(mate) + 8 * r;
        if (head + h >= heads) continue;
        float share = s.share[h];
        Out* to = out + ((i64(row) * splits + split) * heads + head + h) * CHANNELS + thread_again() / TEAM * 256 + 2 * (mate % 4);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const float* two = sums[j / 16] + j % 16 * 4 + 2 * r;
            store_two(to + 8 * j, two[0] * share, two[1] * share);
        }
    }
}
