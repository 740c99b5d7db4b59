// Attention over index lists on Hopper, v4 or v32 rows: lists divided into splits, each an online softmax over tiles of cached rows.
//
// Grid: (rows x tiles of 64 heads, splits). A block owns 64 heads of one row (padded) and an equal share of the tiles of 64 entries that
// the row's lists really have, the second cache's after the first's. Four teams of 128 threads: two decode cached rows to bf16 in shared
// memory (2 x 64 KiB, a tile ahead); one makes scores and weights by wgmma, and adds values to 128 of the 512 channels of the sums; one
// adds the other 384 (192 registers a thread), and finds where rows lie, three tiles ahead.
#include "device/hopper.cuh"

constexpr int TEAM = 128;
constexpr int THREADS = 4 * TEAM;
constexpr int TILE = 64;       // entries, and heads
constexpr int CHANNELS = 512;  // of a value: the first of a key
constexpr int BLOCK = TILE * 128;                 // bytes of 64 rows x 64 channels of bf16, in the 128-byte swizzle
constexpr int BLOCKS = CHANNELS / 64;
constexpr int QUERY_BLOCKS = V32 ? BLOCKS + 1 : BLOCKS;
constexpr int ROPE = QUERY_BLOCKS - 1;            // the block of 64 channels that are stored as bf16; codes of e4m3 are before it
constexpr int SLOT = V32 ? 656 : 576;             // bytes of a slot: codes, in v32 four scales of float32, 64 channels of bf16
constexpr int ROPE_AT = SLOT - 128;
constexpr int STEPS = V32 ? 4 : 3;                // of decoding that bring the same chunks of both rows
constexpr int WEIGHTS = V32 ? 1 : 2;              // tiles whose weights have room
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr u32 EVERYBODY = 0xFFFFFFFFu;

// ---- instructions ------------------------------------------------------------------------------------------------------------------

// slot / page by what the host made of the page's slots: a multiplier below, a shift above.
__device__ __forceinline__ u32 quotient(int slot, i64 divide) { return __umulhi(2 * u32(slot), u32(divide)) >> u32(divide >> 32); }

__device__ __forceinline__ uint4 load_chunk(const u8* from) {
    uint4 chunk;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w) : "l"(from));
    return chunk;
}

__device__ __forceinline__ void store_chunk(u32 to, uint4 chunk) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w) : "memory");
}

// A chunk, asynchronously; `copies_arrive` arrives at a barrier, as one more of those that it counts, when the thread's copies are there.
__device__ __forceinline__ void copy_chunk(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_arrive(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Where kernels are launched to overlap: this one's work begins when the kernel before it has ended; the one after it may be launched.
__device__ __forceinline__ void wait_for_the_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_the_next_kernel_come() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// A slot to the L2, by the lines of 128 bytes that it touches; nobody waits.
__device__ __forceinline__ void fetch_ahead(const u8* data) {
#pragma unroll
    for (int at = 0; at < SLOT; at += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(data + at));
    if (V32) asm volatile("prefetch.global.L2 [%0];" ::"l"(data + SLOT - 1));  // v4's begin at multiples of 64: five lines
}

// Two halves times a power of two, which `factor` holds twice, as two of bf16.
__device__ __forceinline__ u32 scaled(u32 halves, u32 factor) {
    u32 result;
    asm("{\n.reg .b16 low, high;\n.reg .f32 a, b;\n.reg .b32 two;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 a, low;\n"
        "cvt.f32.f16 b, high;\ncvt.rn.bf16x2.f32 two, b, a;\nmul.rn.bf16x2 %0, two, %2;\n}\n"
        : "=r"(result)
        : "r"(halves), "r"(factor));
    return result;
}

// Four codes of e4m3 times a power of two, as two pairs of bf16.
__device__ __forceinline__ void decode_four(u32 codes, u32 factor, u32& low, u32& high) {
    u32 first, second;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
        : "=r"(first), "=r"(second)
        : "r"(codes));
    low = scaled(first, factor), high = scaled(second, factor);
}

// One of the two lists of a row, and its cache.
struct List {
    const u8* cache;
    const int* indices;
    i64 page_stride, divide;
    int pool, page;
};

// A block's tiles: those of a row's first list, then those of its second.
struct Split {
    int lengths[2];               // of the row's lists
    int main_tiles, first, last;  // tiles of the first list, and the block's of both
};

constexpr int RING = 4;    // tiles that are known
constexpr int SCALED = 3;  // of them, those whose scales are
constexpr int STAGES = 4;  // a tile's keys are handed over two blocks at a time: the products begin before all are decoded

struct Shared {
    u8 queries[QUERY_BLOCKS + V32][BLOCK];  // in v32 the last holds the keys' ROPE block, which is no value
    u8 keys[2][BLOCKS][BLOCK];
    u8 weights[WEIGHTS][BLOCK];             // bf16 [heads, entries], in v32 float16
    u32 factors[SCALED][TILE][V32 ? 4 : 8];  // powers of two, twice as bf16, of the groups of codes of a row: seven of 64, or four of 128
    float rests[V32 ? SCALED : 1][4][TILE];  // v32: what the powers leave of a group's scale, in [1, 2): it meets scores and weights
    const u8* places[RING][TILE];   // a row's data
    float bound[RING][TILE];        // of an entry's scores: -inf where it is none, else NaN, which fminf passes over
    float decay[WEIGHTS][TILE];     // of a head's sums
    float share[TILE];              // of a head's sums in the result
    int holes[RING][2];             // whether entries of either half of a tile are none
    Split own;
    int first_head;                 // of the block
    i64 result;                     // where that head's results go: rows x splits x heads before them
    u64 keys_full[2][STAGES], keys_free[2], weights_full[WEIGHTS], weights_free[WEIGHTS], places_full[RING], factors_full[SCALED], rope_free;
};
static_assert(sizeof(Shared) <= SHARED, "the launch gives less");

__device__ __align__(16) u8 nothing[6 * 128];  // zeros: the row of an entry that is none

__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Channels of the codes lie in another order than they are stored: of 16 codes, which a thread decodes at once, one half lies in the
// first half of the block's row, the other in the second, so that the stores of a row's 8 lanes meet no bank twice. Queries lie
// likewise, and results are put back. The first of the 8 channels that lie at a chunk of 16 bytes of a block:
__device__ __forceinline__ u32 channel_at(u32 block, u32 chunk) {
    if (block == ROPE) return block * 64 + chunk * 8;
    return block * 64 + chunk % 4 * 16 + ((chunk / 4) ^ (block & 1)) * 8;
}

// Where 8 channels from 8 x eighth on lie: a chunk of block eighth / 8.
__device__ __forceinline__ u32 chunk_of(u32 eighth) {
    u32 block = eighth / 8, in_block = eighth % 8;
    return block == ROPE ? in_block : in_block / 2 + 4 * ((in_block & 1) ^ (block & 1));
}

// threadIdx.x, read again where it is wanted: no register keeps it through the loop.
__device__ __forceinline__ u32 thread_again() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// ---- where rows lie: by the last team ----------------------------------------------------------------------------------------------

// A row's scales as they are stored: seven bytes, powers of two; in v32 four of float32.
struct Scales {
    u32 words[V32 ? 4 : 2];
};

// What a thread of the last team keeps between tiles: of row thread % 64 of a tile. Threads from 64 on see to scales, the others to the rest.
struct Scout {
    Scales scales;  // of the last tile whose place is known
    int slot;       // of the tile after it
};

__device__ __forceinline__ Split split_of(int length, int extra_length, int split, int splits) {
    int tiles = (length + TILE - 1) / TILE, every = tiles + (extra_length + TILE - 1) / TILE;
    return {{length, extra_length}, tiles, int(i64(every) * split / splits), int(i64(every) * (split + 1) / splits)};
}

// Where a row of a tile stands in its list; -1 behind the list's end.
__device__ __forceinline__ int entry_of(const Split& of, int tile, u32 row) {
    bool second = tile >= of.main_tiles;
    int entry = (second ? tile - of.main_tiles : tile) * TILE + int(row);
    return tile < of.last && entry < (second ? of.lengths[1] : of.lengths[0]) ? entry : -1;
}

// The slot listed there; -1: none.
__device__ __forceinline__ int slot_of(const Split& of, const List& main, const List& extra, int tile, u32 row) {
    int entry = entry_of(of, tile, row);
    return entry < 0 ? -1 : __ldg((tile >= of.main_tiles ? extra.indices : main.indices) + entry);
}

// Says where row `row` of the block's tile n lies, for `slot` of its list; returns its scales.
__device__ __forceinline__ Scales find(Shared& s, const Split& of, const List& main, const List& extra, u32 n, int slot, u32 mate) {
    u32 row = mate % TILE;
    bool second = int(of.first + n) >= of.main_tiles, there = u32(slot) < u32(second ? extra.pool : main.pool);
    u32 slots = second ? extra.page : main.page;
    u32 page = quotient(slot, second ? extra.divide : main.divide), in_page = slot - page * slots;
    const u8* at = (second ? extra.cache : main.cache) + page * (second ? extra.page_stride : main.page_stride);
    const u8* data = there ? at + in_page * SLOT : nothing;
    Scales scales = {};
    if (mate >= TILE) {
        if (!there) return scales;
        if (V32) {
            uint4 four = __ldg(reinterpret_cast<const uint4*>(data + ROPE_AT - 16));
            scales.words[0] = four.x, scales.words[1] = four.y, scales.words[V32 ? 2 : 0] = four.z, scales.words[V32 ? 3 : 0] = four.w;
        } else {
            u64 bytes = __ldg(reinterpret_cast<const u64*>(at + i64(slots) * SLOT) + in_page);
            scales.words[0] = u32(bytes), scales.words[1] = u32(bytes >> 32);
        }
        return scales;
    }
    fetch_ahead(data);
    s.places[n % RING][row] = data;
    s.bound[n % RING][row] = there ? __uint_as_float(0x7FC00000u) : minus_infinity();
    bool holes = __any_sync(EVERYBODY, !there);
    if (row % 32 == 0) s.holes[n % RING][row / 32] = holes;
    barrier_arrive(&s.places_full[n % RING]);
    return scales;
}

// A power of two from its code, twice as bf16. ue8m0: 0 is 2^-127, 255 is NaN.
__device__ __forceinline__ u32 factor_of(u32 code) { return code == 255 ? 0x7FC07FC0u : code == 0 ? 0x00400040u : code * 0x00800080u; }

__device__ __forceinline__ void give_factors(Shared& s, u32 n, const Scales& scales, u32 mate) {
    if (mate < TILE) return;
    u32 row = mate % TILE, to = shared_address(s.factors[n % SCALED][row]), four[4];
    if (V32) {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            u32 bits = scales.words[V32 ? group : 0];
            float scale = __uint_as_float(bits), rest = __uint_as_float((bits & 0x007FFFFF) | 0x3F800000);
            four[group] = (bits >> 16 & 0x7F80) * 0x00010001u;
            s.rests[V32 ? n % SCALED : 0][group][row] = scale > 0 && scale < -minus_infinity() ? rest : scale;
        }
    } else {
#pragma unroll
        for (int group = 0; group < 4; ++group) four[group] = factor_of(scales.words[0] >> 8 * group & 0xFF);
    }
    store_chunk(to, make_uint4(four[0], four[1], four[2], four[3]));
    if (!V32) {
        u32 high = scales.words[1];
        store_chunk(to + 16, make_uint4(factor_of(high & 0xFF), factor_of(high >> 8 & 0xFF), factor_of(high >> 16 & 0xFF), 0));
    }
    barrier_arrive(&s.factors_full[n % SCALED]);
}

// Tiles 0 to 2, and the scales of 0 and 1; `guesses` are slots of the first tiles of full lists.
__device__ __forceinline__ Scout find_first(Shared& s, const Split& of, const List& main, const List& extra, u32 mate, int width, int extra_width,
                                            int split, int splits, int (&guesses)[RING]) {
    Split full = split_of(width, extra_width, split, splits);
    bool right = full.first == of.first && full.main_tiles == of.main_tiles;
#pragma unroll
    for (int n = 0; n < RING; ++n) {
        if (!right) guesses[n] = slot_of(of, main, extra, of.first + n, mate % TILE);
        else if (entry_of(of, of.first + n, mate % TILE) < 0) guesses[n] = -1;
    }
    Scales scales[RING - 1];
#pragma unroll
    for (int n = 0; n < RING - 1; ++n) scales[n] = find(s, of, main, extra, n, guesses[n], mate);
    give_factors(s, 0, scales[0], mate);
    give_factors(s, 1, scales[1], mate);
    return {scales[2], guesses[3]};
}

// Before tile n, when all are done with tile n - 1: scales of tile n + 2, the place of n + 3, the list's entry of n + 4.
__device__ __forceinline__ void find_next(Shared& s, const Split& of, const List& main, const List& extra, u32 n, Scout& scout, u32 mate) {
    give_factors(s, n + 2, scout.scales, mate);
    scout.scales = find(s, of, main, extra, n + 3, scout.slot, mate);
    scout.slot = slot_of(of, main, extra, of.first + n + 4, mate % TILE);
}

// ---- cached rows: by the first two teams -------------------------------------------------------------------------------------------

// A warp brings 8 of a tile's 64 rows, four of either half: lane / 8 says which of four, lane % 8 which chunks of 16 bytes: of codes
// lane % 8 + 0, 8, 16 and in v32 24 of both rows; in v4, which has four chunks more, those of one row by lanes 0 to 3 and of the other by
// 4 to 7; and one of the ROPE block of both.

// Sixteen codes of e4m3 times a power of two, as bf16 exactly, to two places of shared memory.
__device__ __forceinline__ void decode(uint4 codes, u32 factor, u32 to, u32 other) {
    uint4 first, second;
    decode_four(codes.x, factor, first.x, first.y);
    decode_four(codes.y, factor, first.z, first.w);
    store_chunk(to, first);
    decode_four(codes.z, factor, second.x, second.y);
    decode_four(codes.w, factor, second.z, second.w);
    store_chunk(other, second);
}

// The ROPE block's chunks of a thread's two rows, of a tile that is known.
__device__ __forceinline__ void copy_rope(Shared& s, u32 to, u32 known, u32 row, u32 eighth, u32 buffer) {
#pragma unroll
    for (int half = 0; half < 2; ++half) copy_chunk(to + half * 32 * 128, s.places[known][row + 32 * half] + ROPE_AT + eighth * 16);
    copies_arrive(&s.keys_full[buffer][STAGES - 1]);
}

// Brings the block's tiles: as a chunk has been decoded, the same chunk of the next tile is asked for.
__device__ __forceinline__ void bring(Shared& s) {
    u32 lane = threadIdx.x % 32, eighth = lane % 8, row = threadIdx.x / 32 * 4 + lane / 8;
    bool upper = eighth >= 4;
    u32 last_row = row + (upper ? 32 : 0), tiles = s.own.last - s.own.first;
    uint4 codes[2][STEPS], last_codes;
    barrier_wait(&s.places_full[0], 0);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < STEPS; ++i) codes[half][i] = load_chunk(s.places[0][row + 32 * half] + eighth * 16 + 128 * i);
    if (!V32) last_codes = load_chunk(s.places[0][last_row] + eighth % 4 * 16 + 384);
    u32 at = shared_address(s.keys) + eighth / 4 * BLOCK + chunk_at(row, eighth);
#pragma unroll 1
    for (u32 n = 0; n < tiles; ++n) {
        u32 buffer = n % 2, shift = buffer * BLOCKS * BLOCK, known = n % RING, next = (n + 1) % RING;
        if (n >= 2) barrier_wait(&s.keys_free[buffer], n / 2 - 1 & 1);
        if (!V32) copy_rope(s, at + shift + ROPE * BLOCK - (upper ? BLOCK : 0), known, row, eighth, buffer);
        barrier_wait(&s.factors_full[n % SCALED], n / SCALED & 1);
        barrier_wait(&s.places_full[next], (n + 1) / RING & 1);
        const u8* from[2];
        if (!V32) from[0] = s.places[next][row] + eighth * 16, from[1] = s.places[next][row + 32] + eighth * 16;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (i == STAGES - 1) {
                if (n > 0) barrier_wait(&s.rope_free, n - 1 & 1);
                copy_rope(s, shared_address(s.queries[QUERY_BLOCKS]) + chunk_at(row, eighth), known, row, eighth, buffer);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 to = at + shift + i * 2 * BLOCK + half * 32 * 128;
                decode(codes[half][i], s.factors[n % SCALED][row + 32 * half][V32 ? i : eighth / 4 + 2 * i], to, to ^ 64);
                if (V32) from[half] = s.places[next][row + 32 * half] + eighth * 16;  // anew: v32 has no registers for them
                codes[half][i] = load_chunk(from[half] + 128 * i);
            }
            fence_for_async();
            barrier_arrive(&s.keys_full[buffer][i]);
        }
        if (!V32) {
            u32 to = at + shift + 6 * BLOCK;
            if (upper) to = (to ^ 64) + 32 * 128 - BLOCK;
            decode(last_codes, s.factors[n % SCALED][last_row][6 % (V32 ? 4 : 8)], to, to ^ 64);
            last_codes = load_chunk(s.places[next][last_row] + eighth % 4 * 16 + 384);
            fence_for_async();
            barrier_arrive(&s.keys_full[buffer][STAGES - 1]);
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

// sums [64, 128] (+)= a [64, 16] x b [16, 128] in bf16: a in registers; b's rows are entries, as the keys lie.
__device__ __forceinline__ void product_values(float (&sums)[64], const u32* a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}\n"
                 : REGISTERS_64(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

// sums [64, 192] (+)= a [64, 16] x b [16, 192], both in shared memory.
__device__ __forceinline__ void product_more_values(float (&sums)[96], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,"
                 "%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, %96, %97, add, 1, 1, 0, 1;\n}\n"
                 : REGISTERS_64(sums, 0), REGISTERS_32(sums, 64)
                 : "l"(a), "l"(b), "r"(int(add)));
}

// Four matrices of 8 x 8 of 16 bits; rows go where lanes 8 i to 8 i + 7 say for matrix i.
__device__ __forceinline__ void store_matrices(u32 to, const u32* four) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four[0]), "r"(four[1]), "r"(four[2]),
                 "r"(four[3])
                 : "memory");
}

// The four matrices that `store_matrices` stored there.
__device__ __forceinline__ void load_matrices(u32 (&four)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Two of float16 times two numbers, as two of bf16.
__device__ __forceinline__ u32 times(u32 pair, float2 by) {
    float low, high;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n" : "=f"(low), "=f"(high) : "r"(pair));
    return pack_bf16(low * by.x, high * by.y);
}

// An operand of rows along the sum: blocks of 64 columns BLOCK bytes apart, 8 rows 1,024 bytes.
__device__ __forceinline__ u64 operand_by_rows(const void* rows) {
    return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(BLOCK >> 4) << 16) | ((shared_address(rows) & 0x3FFFF) >> 4);
}

__device__ __forceinline__ float power(float exponent) {  // of 2
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

// scores (+)= a block of queries x a block of keys.
__device__ __forceinline__ void product_block(float (&scores)[32], const u8* queries, const u8* keys, bool fresh) {
    u64 a = operand(queries), b = operand(keys);
#pragma unroll
    for (int step = 0; step < 4; ++step) product_scores(scores, a + 2 * step, b + 2 * step, !fresh || step > 0);
}

// Of a thread's two heads the first; the other is 8 below.
__device__ __forceinline__ u32 own_head(u32 mate) { return mate / 32 * 16 + mate % 32 / 4; }

template <int N>
__device__ __forceinline__ void decay_sums(float (&sums)[N], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] *= i % 4 < 2 ? upper : lower;
}

// Weights are powers of two of what a score is above `top`: the largest score, or up to so much less, which spares the sums a decay.
constexpr float SLACK = 8.0f;

// Scores and weights of a tile, to shared memory and as the second product takes them; returns the decay of its rows' sums so far. top
// (in powers of two), total: of both rows of a thread.
__device__ __forceinline__ void weigh(Shared& s, u32 n, float scale, float (&top)[2], float (&total)[2], float (&decay)[2], u32 (&weights)[16]) {
    u32 buffer = n % 2, room = n % WEIGHTS;
    float scores[32];
    bool holes;
    if (V32) {
#pragma unroll
        for (int group = 0; group <= STAGES; ++group) {  // of two blocks; then the ROPE block, which has no scale
            float part[32];
            if (group < STAGES) barrier_wait(&s.keys_full[buffer][group], n / 2 & 1);
            else fence_for_async();  // for what was copied
            products_begin();
#pragma unroll
            for (int block = 2 * group; block < 2 * group + 2 && block < QUERY_BLOCKS; ++block)
                product_block(part, s.queries[block], block < BLOCKS ? s.keys[buffer][block] : s.queries[QUERY_BLOCKS], block == 2 * group);
            products_wait();
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float2 rest = make_float2(1.0f, 1.0f);
                const float* rests = s.rests[V32 ? n % SCALED : 0][group % 4] + 2 * (thread_again() % 4);
                if (group < STAGES) rest = *reinterpret_cast<const float2*>(rests + 8 * j);
#pragma unroll
                for (int i = 0; i < 4; ++i) scores[4 * j + i] = fmaf(part[4 * j + i], i % 2 ? rest.y : rest.x, group ? scores[4 * j + i] : 0.0f);
            }
        }
        holes = s.holes[n % RING][0] | s.holes[n % RING][1];
    } else {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (block % 2 == 0) {
                barrier_wait(&s.keys_full[buffer][block / 2], n / 2 & 1);
                if (block / 2 == STAGES - 1) fence_for_async();  // for what was copied
                products_begin();
            }
            product_block(scores, s.queries[block], s.keys[buffer][block], block == 0);
        }
        holes = s.holes[n % RING][0] | s.holes[n % RING][1];
        products_wait();
    }
    if (V32) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.rope_free);
    }
    u32 mate = thread_again() % TEAM, quad = mate % 4;
    if (holes) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float2 bound = *reinterpret_cast<const float2*>(s.bound[n % RING] + 8 * j + 2 * quad);
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[4 * j + i] = fminf(scores[4 * j + i], i % 2 ? bound.y : bound.x);
        }
    }
    float least[2];  // minus `top`, or 0 where that is infinite: -inf minus itself is NaN
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest[2] = {scores[2 * r], scores[2 * r + 1]};
#pragma unroll
        for (int j = 1; j < 8; ++j) highest[0] = fmaxf(highest[0], scores[4 * j + 2 * r]), highest[1] = fmaxf(highest[1], scores[4 * j + 2 * r + 1]);
        float high = fmaxf(highest[0], highest[1]);
        high = fmaxf(high, __shfl_xor_sync(EVERYBODY, high, 1));
        high = fmaxf(high, __shfl_xor_sync(EVERYBODY, high, 2)) * scale;
        float now = high > top[r] + SLACK ? high : top[r];
        least[r] = now == minus_infinity() ? 0.0f : -now;
        decay[r] = power(top[r] + least[r]);
        top[r] = now;
        total[r] *= decay[r];
    }
    if (n >= WEIGHTS) barrier_wait(&s.weights_free[room], n / WEIGHTS - 1 & 1);
    u32 to = shared_address(s.weights[room]) + chunk_at(mate / 32 * 16 + mate % 16, mate / 16 % 2);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // columns 8 (2 step + i / 2) of row i % 2
            const float* two = scores + 4 * (2 * step + i / 2) + 2 * (i % 2);
            float first = power(fmaf(two[0], scale, least[i % 2])), second = power(fmaf(two[1], scale, least[i % 2]));
            total[i % 2] += first + second;
            pairs[i] = weights[4 * step + i] = pack_bf16(first, second);
            if (V32) {  // this team's values are those of the first group; the other team multiplies, and rounds to bf16 only then
                pairs[i] = pack_f16(first, second);
                float2 rest = *reinterpret_cast<const float2*>(s.rests[V32 ? n % SCALED : 0][0] + 8 * (2 * step + i / 2) + 2 * quad);
                weights[4 * step + i] = pack_bf16(first * rest.x, second * rest.y);
            }
        }
        store_matrices(to ^ (step << 5), pairs);
    }
    u32 row = own_head(mate);
    if (quad == 0) s.decay[room][row] = decay[0], s.decay[room][row + 8] = decay[1];
    barrier_arrive(&s.weights_full[room]);
}

// Makes the block's scores and weights, and the sums of the first 128 channels.
__device__ __forceinline__ void attend(Shared& s, float scale, float (&sums)[64], float (&top)[2], float (&total)[2]) {
    u32 tiles = s.own.last - s.own.first;
#pragma unroll 1
    for (u32 n = 0; n < tiles; ++n) {
        float decay[2];
        u32 buffer = n % 2, weights[16];
        weigh(s, n, scale, top, total, decay, weights);
        if (n > 0 && __any_sync(EVERYBODY, decay[0] != 1.0f || decay[1] != 1.0f)) decay_sums(sums, decay[0], decay[1]);
        u64 b = operand_by_rows(s.keys[buffer][0]);
        products_begin();
#pragma unroll
        for (int step = 0; step < TILE / 16; ++step) product_values(sums, weights + 4 * step, b + step * (2048 >> 4), n + step > 0);
        products_wait();
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.keys_free[buffer]);
    }
}

// The sums of the other 384 channels: two parts of 192, or by the groups of v32 three of 128.
using More = float[V32 ? 3 : 2][V32 ? 64 : 96];

// Makes them.
__device__ __forceinline__ void add_values(Shared& s, const List& main, const List& extra, More& sums, Scout scout) {
    u32 tiles = s.own.last - s.own.first;
#pragma unroll 1
    for (u32 n = 0; n < tiles; ++n) {
        find_next(s, s.own, main, extra, n, scout, thread_again() % TEAM);  // not while products run: the assembler would make them wait
        u32 buffer = n % 2, room = n % WEIGHTS, own = own_head(thread_again() % TEAM);
        barrier_wait(&s.keys_full[buffer][STAGES - 1], n / 2 & 1);
        barrier_wait(&s.weights_full[room], n / WEIGHTS & 1);
        fence_for_async();  // for copies, and for weights: their team has no time for it
        float upper = s.decay[room][own], lower = s.decay[room][own + 8];
        if (n > 0 && __any_sync(EVERYBODY, upper != 1.0f || lower != 1.0f)) for (auto& part : sums) decay_sums(part, upper, lower);
        u64 b = operand_by_rows(s.keys[buffer][2]);
#if V32
        u32 mate = thread_again() % TEAM;
        u32 from = shared_address(s.weights[room]) + chunk_at(mate / 32 * 16 + mate % 16, mate / 16 % 2);
#pragma unroll
        for (int step = 0; step < TILE / 16; ++step) {
            u32 weights[4];
            load_matrices(weights, from ^ (step << 5));
#pragma unroll
            for (int group = 1; group < 4; ++group) {
                u32 own_weights[4];
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    float2 rest = *reinterpret_cast<const float2*>(s.rests[n % SCALED][group] + 16 * step + 4 * i + 2 * (mate % 4));
                    own_weights[i] = times(weights[i], rest), own_weights[i + 1] = times(weights[i + 1], rest);
                }
                products_begin();
                product_values(sums[group - 1], own_weights, b + step * (2048 >> 4) + (group - 1) * (2 * BLOCK >> 4), n + step > 0);
                products_wait();  // no registers are left for the next weights beside these
            }
        }
        named_barrier(3, TEAM);  // before one of its threads overwrites what is left of the scales
#else
        u64 a = operand(s.weights[room]);
        products_begin();
#pragma unroll
        for (int step = 0; step < TILE / 16; ++step)
#pragma unroll
            for (int part = 0; part < 2; ++part)
                product_more_values(sums[part], a + 2 * step, b + step * (2048 >> 4) + part * (3 * BLOCK >> 4), n + step > 0);
        products_wait();
#endif
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.keys_free[buffer]), barrier_arrive(&s.weights_free[room]);
    }
}

using Out = OUT;  // u16: bf16

constexpr int PITCH = CHANNELS * int(sizeof(Out)) + 8 * 4 * int(sizeof(Out)) / 2;  // bytes of a head's results: stores of 8 heads meet no bank twice
static_assert(TILE * PITCH <= sizeof(Shared::keys) + sizeof(Shared::weights), "results lie where keys and weights lay");

__device__ __forceinline__ void store_two(float* to, float first, float second) { *reinterpret_cast<float2*>(to) = make_float2(first, second); }

__device__ __forceinline__ void store_two(u16* to, float first, float second) {
    *reinterpret_cast<u32*>(to) = pack_bf16(first, second);
}

// Where a head's results from `channel` on lie before they leave.
__device__ __forceinline__ Out* staged(Shared& s, u32 head, u32 channel) {
    return reinterpret_cast<Out*>(&s.keys[0][0][0] + head * PITCH) + channel;
}

__device__ __forceinline__ int length_of(const int* lengths, int row, int width) {
    int length = max(width, 0);
    return lengths == nullptr ? length : min(max(lengths[row], 0), length);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_kernel(const u8* q, const float* sink, Out* out, float* lse, const u8* cache, const int* indices, const int* lengths,
                  const u8* extra_cache, const int* extra_indices, const int* extra_lengths, int heads, int head_tiles, int width,
                  int pool, int page, int extra_width, int extra_pool, int extra_page, i64 q_row, i64 q_head, i64 page_stride,
                  i64 divide, i64 list_row, i64 extra_page_stride, i64 extra_divide, i64 extra_list_row, float scale) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int thread = threadIdx.x, team = thread / TEAM, split = blockIdx.y, splits = gridDim.y;
    u32 row = blockIdx.x / u32(head_tiles), head = blockIdx.x % u32(head_tiles) * TILE;
    if (thread < 2) {
        for (int stage = 0; stage < STAGES; ++stage)  // each thread of two teams: its stores; of the last stage its copies too
            barrier_init(&s.keys_full[thread][stage], (stage == STAGES - 1 ? 4 : 2) * TEAM);
        barrier_init(&s.keys_free[thread], 2 * TEAM / 32);
    }
    if (thread < WEIGHTS) {
        barrier_init(&s.weights_full[thread], TEAM);
        barrier_init(&s.weights_free[thread], TEAM / 32);
    }
    if (thread == 0) barrier_init(&s.rope_free, TEAM / 32);
    if (thread < RING) barrier_init(&s.places_full[thread], TILE);
    if (thread < SCALED) barrier_init(&s.factors_full[thread], TILE);
    List main = {cache, indices + row * list_row, page_stride, divide, pool, page};
    List extra = {extra_cache, extra_indices + row * extra_list_row, extra_page_stride, extra_divide, extra_pool, extra_page};
    wait_for_the_kernel_before();
    let_the_next_kernel_come();
    int guesses[RING];  // entries of the first tiles if the lists are full: not a latency behind their lengths
    if (team == 3) {
        Split full = split_of(max(width, 0), max(extra_width, 0), split, splits);
#pragma unroll
        for (int n = 0; n < RING; ++n) guesses[n] = slot_of(full, main, extra, full.first + n, thread % TILE);
    } else if (team == 2) {  // queries: 8 chunks of 16 bytes a head and block
#pragma unroll 8
        for (u32 i = thread % TEAM; i < TILE * 8 * QUERY_BLOCKS; i += TEAM) {
            u32 h = i / (8 * QUERY_BLOCKS), c = i % (8 * QUERY_BLOCKS), to = shared_address(s.queries[c / 8]) + chunk_at(h, chunk_of(c));
            if (head + h < heads) copy_chunk(to, q + row * q_row + (head + h) * q_head + c * 16);
            else store_chunk(to, make_uint4(0, 0, 0, 0));
        }
    } else if (thread == 0) {
        s.first_head = head, s.result = (i64(row) * splits + split) * heads + head;
        s.own = split_of(length_of(lengths, row, width), length_of(extra_lengths, row, extra_width), split, splits);
    }
    __syncthreads();
    const Split own = s.own;
    bool any = own.first < own.last;
    if (team < 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (any) bring(s);
        return;
    }
    u32 mate = thread % TEAM;
    if (team == 2) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        copies_wait();
        fence_for_async();
        named_barrier(1, TEAM);
        float sums[64], top[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f}, shares[2];
        if (any) attend(s, scale, sums, top, total);
        // What follows is found again, so that no register keeps it until here.
        u32 first_head = s.first_head, column = thread_again() % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            total[r] += __shfl_xor_sync(EVERYBODY, total[r], 1);
            total[r] += __shfl_xor_sync(EVERYBODY, total[r], 2);
            u32 h = own_head(thread_again() % TEAM) + 8 * r;
            float below = total[r];
            if (!SPLIT && sink != nullptr && first_head + h < heads) {
                float safe = top[r] == minus_infinity() ? 0.0f : top[r];
                below += power(sink[first_head + h] * LOG2E - safe);
            }
            float share = total[r] == 0.0f ? 0.0f : 1.0f / below;
            if (column == 0) {
                s.share[h] = share;
                if (first_head + h < heads) lse[s.result + h] = (top[r] + log2f(total[r])) * (SPLIT ? 1.0f : LN2);
            }
            shares[r] = share;
        }
        named_barrier(2, 2 * TEAM);  // keys and weights are done with
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float* two = sums + 4 * j + 2 * r;
                u32 h = own_head(thread_again() % TEAM) + 8 * r;
                store_two(staged(s, h, channel_at(j / 8, j % 8) + column), two[0] * shares[r], two[1] * shares[r]);
            }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        More sums;
        if (any) {
            Scout scout = find_first(s, own, main, extra, mate, max(width, 0), max(extra_width, 0), split, splits, guesses);
            add_values(s, main, extra, sums, scout);
        }
        named_barrier(2, 2 * TEAM);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            u32 h = own_head(thread_again() % TEAM) + 8 * r, column = thread_again() % 4 * 2;
            float share = s.share[h];
#pragma unroll
            for (int j = 0; j < 48; ++j) {
                constexpr int PART = V32 ? 16 : 24;
                const float* two = sums[j / PART] + j % PART * 4 + 2 * r;
                store_two(staged(s, h, channel_at(2 + j / 8, j % 8) + column), two[0] * share, two[1] * share);
            }
        }
    }
    if (SPLIT && !any) return;  // of a split of nothing only the log-sum-exp is written, which says so
    named_barrier(2, 2 * TEAM);
    constexpr u32 A_HEAD = CHANNELS * sizeof(Out) / 16;  // in chunks
    u32 chunks = min(TILE, heads - s.first_head) * A_HEAD;
    const u8* from = &s.keys[0][0][0];
    uint4* to = reinterpret_cast<uint4*>(out + s.result * CHANNELS);
    constexpr u32 BATCH = 8;  // all loads of a batch before its first store
#pragma unroll 1
    for (u32 i = thread_again() - 2 * TEAM; i < chunks; i += BATCH * 2 * TEAM) {
        uint4 batch[BATCH];
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
            u32 at = i + k * 2 * TEAM;
            batch[k] = any && at < chunks ? *reinterpret_cast<const uint4*>(from + at / A_HEAD * PITCH + at % A_HEAD * 16) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k)
            if (i + k * 2 * TEAM < chunks) to[i + k * 2 * TEAM] = batch[k];
    }
}
