// Indexer scores on Hopper: a persistent grid over the tiles of real keys.
//
// Grid: as many blocks as stay resident; each takes an equal stretch of tiles, in order. A block: one warp that copies tiles of 64
// keys (8 KiB, by the copy engine, STAGES in flight) and their scales to shared memory, and TEAMS teams of four warps that take
// turns in multiplying them with the queries of up to RUN rows of the request, which stay in shared memory for a run; sums over
// heads are made in registers. Written: logits, or (KEYS) what index_topk selects from: keys of the scores, and their maxima over
// groups of 8 behind the row's keys, or in the place of a long row's.
#include "mqa_logits/hopper.cuh"

constexpr int PASSES = RUN / PASS;  // products of a tile, each with PASS rows
constexpr int COLUMNS = PASS * HEAD_COUNT;
constexpr int PASSES_HELD = HOLD ? PASSES : 1;  // whose weights stay in registers
constexpr int SCORERS = TEAMS * MATH;
constexpr bool GIVES = SCORER_REGISTERS > 0;  // the copying warp has a team's registers, and gives most of them away
constexpr int THREADS = SCORERS + (GIVES ? MATH : 32);
constexpr int GROUP = 8;
static_assert(STAGES % TEAMS == 0, "a stage is one team's: a barrier tells two phases apart");
constexpr int OWN_ROWS = (MOST_ROWS + THREADS - 1) / THREADS;

struct Shared {
    u8 tiles[STAGES][TILE * WIDTH];
    u8 queries[RUN * HEAD_COUNT * WIDTH];
    float scales[STAGES][TILE];
    float weight[RUN * HEAD_COUNT];
    u64 full[STAGES], empty[STAGES];
    int there[STAGES];
    int request[MOST_ROWS], length[MOST_ROWS], ends[MOST_ROWS];
    int warp_sums[THREADS / 32], first_row;
};
static_assert(sizeof(Shared) <= SHARED, "the launch gives less");

// A block's stretch of tiles, and the row whose run has the first of them.
struct Stretch {
    int tile, end, row;
};

// The tiles of the run that begins at a row; 0 where none does.
__device__ __forceinline__ int tiles_of_run(const Shared& s, int row, int rows) {
    int longest = s.length[row];
    if constexpr (RUN > 1) {
        int first = row, request = s.request[row];
        while (first > 0 && s.request[first - 1] == request) --first;
        if ((row - first) % RUN != 0) return 0;
        for (int j = row + 1; j < min(row + RUN, rows) && s.request[j] == request; ++j) longest = max(longest, s.length[j]);
    }
    return (longest + TILE - 1) / TILE;
}

// Requests and lengths of the rows, and `ends`: the tiles of all runs up to each row's. A run, up to RUN rows of one request side
// by side, has its tiles at its first row.
__device__ __forceinline__ Stretch read_rows(Shared& s, const int* lengths, const int* row_to_request, int rows, int requests,
                                             int span) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int row = threadIdx.x; row < MOST_ROWS; row += THREADS) {
        if (row >= rows) break;
        int request = row_to_request == nullptr ? row : row_to_request[row], length = lengths[row];
        bool there = request >= 0 && request < requests;
        s.request[row] = there ? request : -1;
        s.length[row] = there ? min(max(length, 0), span) : 0;
    }
    __syncthreads();
    int tiles[OWN_ROWS], own = 0, row = threadIdx.x * OWN_ROWS;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) tiles[i] = row + i < rows ? tiles_of_run(s, row + i, rows) : 0, own += tiles[i];
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xFFFFFFFFu, end, step);
        if (lane >= step) end += other;
    }
    if (lane == 31) s.warp_sums[threadIdx.x / 32] = end;
    __syncthreads();
    int of_warp = lane < THREADS / 32 ? s.warp_sums[lane] : 0;
    i64 total = __reduce_add_sync(0xFFFFFFFFu, of_warp);
    end += __reduce_add_sync(0xFFFFFFFFu, lane < threadIdx.x / 32 ? of_warp : 0) - own;
    Stretch stretch{int(total * blockIdx.x / gridDim.x), int(total * (blockIdx.x + 1) / gridDim.x), 0};
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        int begin = end;
        end += tiles[i];
        if (row + i >= rows) break;
        s.ends[row + i] = end;
        if (begin <= stretch.tile && stretch.tile < end) s.first_row = row + i;
    }
    __syncthreads();
    stretch.row = s.first_row;
    return stretch;
}

// The part of a run that a block has: tiles `first` up to `last` of the row's; `end` is the one behind them.
struct Part {
    int row, request, size, first, last, end;
};

// The part that holds the first tile of the stretch.
__device__ __forceinline__ Part part_of(const Shared& s, Stretch stretch, int rows) {
    int row = stretch.row;
    while (s.ends[row] <= stretch.tile) ++row;
    int begin = row == 0 ? 0 : s.ends[row - 1], end = s.ends[row];
    Part part{row, s.request[row], 1, stretch.tile - begin, min(end, stretch.end) - begin, min(end, stretch.end)};
    for (int j = 1; j < RUN && row + j < rows && s.ends[row + j] == end && s.request[row + j] == part.request; ++j)
        part.size = j + 1;
    return part;
}

// Copies the tiles of the stretch, one after the other. By one warp.
__device__ __forceinline__ void copy_tiles(Shared& s, Stretch stretch, const TensorMap* keys, const float* scales, const int* pages,
                                           int rows, int pool, int page_keys, i64 scale_stride, i64 table_stride) {
    int lane = threadIdx.x % 32, stage = 0, parity = 1;
    while (stretch.tile < stretch.end) {
        Part part = part_of(s, stretch, rows);
        const int* table = pages + part.request * table_stride;
        for (int from = part.first; from < part.last; from += 32) {
            int own_page = table[min(from + lane, part.last - 1) * TILE / page_keys];
#pragma unroll 1
            for (int t = from; t < min(from + 32, part.last); ++t) {
                int page = __shfl_sync(0xFFFFFFFFu, own_page, t - from);
                if (lane == 0) {
                    bool there = page >= 0 && page < pool;
                    int slot = t * TILE % page_keys;
                    barrier_wait(&s.empty[stage], parity);
                    s.there[stage] = there;
                    barrier_expect(&s.full[stage], TILE * WIDTH + (there ? TILE * 4 : 0));
                    copy_box(s.tiles[stage], keys, 0, slot, there ? page : pool, &s.full[stage]);
                    if (there) copy_bytes(s.scales[stage], scales + page * scale_stride + slot, TILE * 4, &s.full[stage]);
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        stretch.tile = part.end;
        stretch.row = part.row;
    }
}

// Where a thread's scores of a row go, in words from the start of what is written, which 32 bits count.
struct Target {
    u32 to, to_maxima;  // of its key of the row's first tile, and of that key's group
    int left;           // entries of the row at that key and behind it
    bool keys;          // keys are kept: the row is not long
};

constexpr int SCORES = RUN / (PASS > 1 ? 2 : 1);  // of a thread, of each tile

__device__ __forceinline__ Target target_of(int row, int length, u32 row_words, int own) {
    u32 to = row * row_words;
    bool keys = !KEYS || length <= DENSE;
    return {to + own, to + (keys ? DENSE : 0) + own / GROUP, length - own, keys};
}

// Writes the score of the thread's key in the tile that begins at `entry`.
__device__ __forceinline__ void write(u32* out, Target target, int entry, float score) {
    bool live = entry < target.left;
    if constexpr (!KEYS) {
        if (live) out[target.to + entry] = __float_as_uint(score);
    } else {
        u32 key = live ? to_key(score) : 0, highest = key;
        if (live && target.keys) out[target.to + entry] = key;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest = max(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, step));
        if (live && threadIdx.x % 32 < 4) out[target.to_maxima + entry / GROUP] = highest;  // one of the group's eight threads
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_MULTIPROCESSOR)
    score_kernel(const __grid_constant__ TensorMap keys, const float* scales, const u8* q, const float* weights,
                 const int* lengths, const int* pages, const int* row_to_request, u32* out, int rows,
                 int requests, int heads, int span, int pool, int page_keys, i64 q_row, i64 q_head, i64 scale_stride,
                 i64 table_stride, int row_words) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int thread = threadIdx.x;
    if (thread < STAGES) {
        barrier_init(&s.full[thread], 1);
        barrier_init(&s.empty[thread], MATH / 32);
        fence_for_async();
    }
    Stretch stretch = read_rows(s, lengths, row_to_request, rows, requests, span);
    if (thread >= SCORERS) {
        if constexpr (GIVES) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (thread < SCORERS + 32) copy_tiles(s, stretch, &keys, scales, pages, rows, pool, page_keys, scale_stride, table_stride);
        return;
    }
    if constexpr (GIVES) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GIVES ? SCORER_REGISTERS : 32));
    int team = thread / MATH, mate = thread % MATH, own = own_key(mate), stage = team, parity = 0;
    int next = 0;  // of the block's tiles, counted over all parts: the first of the part
    int second = PASS > 1 ? (mate & 2) / 2 : 0;  // of two rows the one whose score `across` gives this thread
    bool one_of_two = PASS > 1 || (mate & 2) == 0;
    float held[PASSES_HELD][COLUMNS / 4];
    while (stretch.tile < stretch.end) {
        Part part = part_of(s, stretch, rows);
        named_barrier(1, SCORERS);  // everybody has read the queries before
        load_queries<RUN, HEAD_COUNT>(s.queries, s.weight, q, weights, part.row, part.size, heads, q_row, q_head, thread, SCORERS);
        fence_for_async();
        named_barrier(1, SCORERS);
#pragma unroll
        for (int pass = 0; pass < PASSES_HELD; ++pass) own_weights<COLUMNS>(held[pass], s.weight + pass * COLUMNS, mate);
        Target targets[SCORES];
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            int mine = i * (PASS > 1 ? 2 : 1) + second;
            int length = mine < part.size && one_of_two ? s.length[part.row + mine] : 0;
            targets[i] = target_of(part.row + mine, length, row_words, own);
        }
        int first = part.first + (team + TEAMS - next % TEAMS) % TEAMS;
#pragma unroll 1
        for (int t = first; t < part.last; t += TEAMS) {
            barrier_wait(&s.full[stage], parity);
            float scale = s.scales[stage][own];
            bool there = s.there[stage];
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                float sums[COLUMNS / 2];
                multiply<COLUMNS>(sums, s.tiles[stage], s.queries + pass * COLUMNS * WIDTH);
                float(&weight)[COLUMNS / 4] = held[HOLD ? pass : 0];
                if constexpr (!HOLD) own_weights<COLUMNS>(weight, s.weight + pass * COLUMNS, mate);
                if (pass == PASSES - 1) {
                    __syncwarp();
                    if (mate % 32 == 0) barrier_arrive(&s.empty[stage]);
                }
#pragma unroll
                for (int j = 0; j < PASS; j += 2) {
                    float upper, lower, score;
                    sum_heads<HEAD_COUNT>(upper, lower, sums + j * HEAD_COUNT / 2, weight + j * HEAD_COUNT / 4);
                    if constexpr (PASS > 1) {
                        float next_upper, next_lower;
                        sum_heads<HEAD_COUNT>(next_upper, next_lower, sums + (j + 1) * HEAD_COUNT / 2,
                                              weight + (j + 1) * HEAD_COUNT / 4);
                        score = across(upper, lower, next_upper, next_lower, mate);
                    } else {
                        score = across(upper, lower, mate);
                    }
                    write(out, targets[(pass * PASS + j) / (PASS > 1 ? 2 : 1)], t * TILE, there ? score * scale : minus_infinity());
                }
            }
            stage += TEAMS;
            if (stage >= STAGES) stage -= STAGES, parity ^= 1;
        }
        next += part.last - part.first;
        stretch.tile = part.end;
        stretch.row = part.row;
    }
}
