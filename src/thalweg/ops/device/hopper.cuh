// Hopper's own instructions as functions, and the order of scores: what the CUDA kernels of several rooms share.
//
// Barriers are mbarriers in shared memory; copies are bulk copies that complete on one; products are wgmma with both operands in
// shared memory, rows of 128 bytes in the 128-byte swizzle (16-byte chunk c of row r lies at chunk c ^ (r % 8)).
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u64 EVICT_FIRST = 0x12F0000000000000;  // a policy of the L2, as createpolicy makes it

struct alignas(64) TensorMap {
    u8 bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void store_word(u32 shared, u32 word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Barrier `id` (1 to 15) of `threads` threads of the block, whole warps.
__device__ __forceinline__ void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Shared memory written by stores becomes visible to wgmma and to bulk copies; a barrier follows.
__device__ __forceinline__ void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Box of `map` at (x, y, z) to shared memory; what lies outside the tensor becomes zeros, and counts as bytes. Read once: it is the
// first to leave the L2, where what is written beside it stays for the next kernel.
__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, int x, int y, int z, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], "
        "%6;" ::"r"(shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
        : "memory");
}

// `bytes` side by side, a multiple of 16 as both addresses are.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// 4 bytes, that this thread waits for in `copies_wait`; a barrier makes them everybody's.
__device__ __forceinline__ void copy_word(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// An operand whose rows of 128 bytes begin at an address divisible by 1,024.
__device__ __forceinline__ u64 operand(const void* rows) {
    return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(1) << 16) | ((shared_address(rows) & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define REGISTERS_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGISTERS_16(d, i) REGISTERS_8(d, i), REGISTERS_8(d, i + 8)
#define REGISTERS_32(d, i) REGISTERS_16(d, i), REGISTERS_16(d, i + 16)
#define REGISTERS_64(d, i) REGISTERS_32(d, i), REGISTERS_32(d, i + 32)
#define NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES_16 NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 \
    NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PRODUCT_E4M3(columns, names, registers, a_at, b_at, add_at)                                    \
    asm volatile(                                                                                      \
        "{\n.reg .pred add;\nsetp.ne.b32 add, " add_at ", 0;\n"                                        \
        "wgmma.mma_async.sync.aligned.m64n" columns "k32.f32.e4m3.e4m3 {" names "}, " a_at ", " b_at   \
        ", add, 1, 1;\n}\n"                                                                            \
        : registers                                                                                    \
        : "l"(a), "l"(b), "r"(int(add)))

// sums [64, COLUMNS] (+)= a [64, 32] x b [COLUMNS, 32]^T in e4m3, of 128 threads. Thread t has of rows 16 (t / 32) + t % 32 / 4
// and 8 below, in sums[4j], sums[4j + 1] and sums[4j + 2], sums[4j + 3], the columns 8j + 2 (t % 4) and the next.
template <int COLUMNS>
__device__ __forceinline__ void product_e4m3(float (&sums)[COLUMNS / 2], u64 a, u64 b, bool add) {
    static_assert(COLUMNS == 16 || COLUMNS == 32 || COLUMNS == 64 || COLUMNS == 128, "no such product");
    if constexpr (COLUMNS == 16) PRODUCT_E4M3("16", NAMES_8, REGISTERS_8(sums, 0), "%8", "%9", "%10");
    if constexpr (COLUMNS == 32) PRODUCT_E4M3("32", NAMES_16, REGISTERS_16(sums, 0), "%16", "%17", "%18");
    if constexpr (COLUMNS == 64) PRODUCT_E4M3("64", NAMES_32, REGISTERS_32(sums, 0), "%32", "%33", "%34");
    if constexpr (COLUMNS == 128) PRODUCT_E4M3("128", NAMES_64, REGISTERS_64(sums, 0), "%64", "%65", "%66");
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

// Float32 scores as u32 keys of the same order: +0 = -0, NaN above +inf; never 0, which is no entry. As topk/select.py has it.
__device__ __forceinline__ u32 to_key(float score) {
    int bits = __float_as_int(score + 0.0f);
    return score != score ? 0xFFFFFFFEu : u32(bits ^ ((bits >> 31) | int(0x80000000)));
}

__device__ __forceinline__ float to_score(u32 key) {
    return __int_as_float(key >= 0x80000000u ? int(key & 0x7FFFFFFFu) : int(~key));
}
