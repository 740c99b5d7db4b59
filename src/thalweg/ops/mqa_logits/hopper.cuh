// Indexer scores of a tile of 64 keys on wgmma: the pieces that the kernels of mqa_logits and index_topk share.
//
// HEADS (16, 32, 64) heads a row, ROWS rows of one request, PASS of them in one product of COLUMNS columns. Keys are the rows of
// the product, so that a thread sums over heads in registers, and four threads across.
#pragma once
#include "device/hopper.cuh"

constexpr int TILE = 64;       // keys
constexpr int WIDTH = 128;     // bytes of a key or of a head's query
constexpr int MATH = 128;      // threads that multiply

// Heads' queries and weights of `size` rows from `row` on to shared memory, zeros beyond them, by `threads` threads.
template <int ROWS, int HEADS>
__device__ __forceinline__ void load_queries(u8* queries, float* weight, const u8* q, const float* weights, int row, int size,
                                             int heads, i64 q_row, i64 q_head, int thread, int threads) {
#pragma unroll 4
    for (int chunk = thread; chunk < ROWS * HEADS * 8; chunk += threads) {
        int column = chunk / 8, j = column / HEADS, head = column % HEADS, c = chunk % 8;
        uint4 codes = make_uint4(0, 0, 0, 0);
        if (j < size && head < heads) codes = *reinterpret_cast<const uint4*>(q + (row + j) * q_row + head * q_head + c * 16);
        *reinterpret_cast<uint4*>(queries + column * WIDTH + ((c ^ (column % 8)) * 16)) = codes;
    }
    for (int column = thread; column < ROWS * HEADS; column += threads) {
        int j = column / HEADS, head = column % HEADS;
        // Of 16 columns those of one thread's sums stand side by side.
        int at = column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
        weight[at] = j < size && head < heads ? weights[i64(row + j) * heads + head] : 0.0f;
    }
}

// This thread's weights of COLUMNS columns: those of its sums.
template <int COLUMNS>
__device__ __forceinline__ void own_weights(float (&own)[COLUMNS / 4], const float* weight, int thread) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j) {
        float4 four = *reinterpret_cast<const float4*>(weight + 16 * j + 4 * (thread % 4));
        own[4 * j] = four.x, own[4 * j + 1] = four.y, own[4 * j + 2] = four.z, own[4 * j + 3] = four.w;
    }
}

// Products of a tile with COLUMNS queries.
template <int COLUMNS>
__device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2], const u8* tile, const u8* queries) {
    u64 a = operand(tile), b = operand(queries);
    products_begin();
#pragma unroll
    for (int step = 0; step < WIDTH / 32; ++step) product_e4m3<COLUMNS>(sums, a + 2 * step, b + 2 * step, step > 0);
    products_wait();
}

__device__ __forceinline__ float rectify(float dot) {
    float result;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(dot));
    return result;
}

// The sum over heads of this thread's columns, for both of its keys.
template <int HEADS>
__device__ __forceinline__ void sum_heads(float& upper, float& lower, const float* sums, const float* weight) {
    upper = 0.0f;
    lower = 0.0f;
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        upper = fmaf(rectify(sums[4 * j]), weight[2 * j], upper);
        lower = fmaf(rectify(sums[4 * j + 2]), weight[2 * j], lower);
        upper = fmaf(rectify(sums[4 * j + 1]), weight[2 * j + 1], upper);
        lower = fmaf(rectify(sums[4 * j + 3]), weight[2 * j + 1], lower);
    }
}

// Of sums over four threads each: thread t % 2 gets that of its own key, the upper (0) or the lower (1); twice, where t % 4 / 2.
__device__ __forceinline__ float across(float upper, float lower, int thread) {
    bool odd = thread & 1;
    float mine = odd ? lower : upper, other = odd ? upper : lower;
    mine += __shfl_xor_sync(0xFFFFFFFFu, other, 1);
    return mine + __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
}

// The same for two rows: thread t % 4 / 2 gets that of the first row (0) or of the second (1).
__device__ __forceinline__ float across(float upper, float lower, float next_upper, float next_lower, int thread) {
    bool odd = thread & 1, second = thread & 2;
    float mine = odd ? lower : upper, other = odd ? upper : lower;
    float next = odd ? next_lower : next_upper, next_other = odd ? next_upper : next_lower;
    mine += __shfl_xor_sync(0xFFFFFFFFu, other, 1);
    next += __shfl_xor_sync(0xFFFFFFFFu, next_other, 1);
    float stays = second ? next : mine, goes = second ? mine : next;
    return stays + __shfl_xor_sync(0xFFFFFFFFu, goes, 2);
}

// The key of a tile whose score `across` gave this thread of MATH.
__device__ __forceinline__ int own_key(int thread) { return thread / 32 * 16 + thread % 32 / 4 + (thread & 1) * 8; }
