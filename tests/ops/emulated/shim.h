// What hopper.cu kernels use of CUDA, for a CPU: a thread for each thread of a block, barriers of mutexes, products of wgmma read through
// their descriptors (canonical layouts in the 128-byte swizzle), conversions by arithmetic. For tests; it knows no asynchronous proxy.
#pragma once
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
struct D3 {
    int x, y, z;
};
static thread_local D3 threadIdx;
static D3 blockIdx, gridDim;
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
static inline uint4 make_uint4(u32 a, u32 b, u32 c, u32 d) {
    return {a, b, c, d};
}
static inline float2 make_float2(float a, float b) {
    return {a, b};
}
#define __device__
#define __align__(n) alignas(n)
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
using std::max;
using std::min;
alignas(1024) static u8 memory[SHARED];
template <class T>
T __ldg(const T* p) {
    if (((uintptr_t)p) % sizeof(T)) {
        printf("MISALIGNED %p %zu\n", p, sizeof(T));
        abort();
    }
    return *p;
}
static inline float __uint_as_float(u32 x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
static inline u32 __float_as_uint(float f) {
    u32 x;
    memcpy(&x, &f, 4);
    return x;
}
static inline float minus_infinity() {
    return -INFINITY;
}
struct Bar {
    std::mutex m;
    std::condition_variable c;
    u32 n = 0, gen = 0;
    void sync(u32 total) {
        std::unique_lock<std::mutex> l(m);
        u32 g = gen;
        if (++n == total) {
            n = 0;
            ++gen;
            c.notify_all();
        } else
            c.wait(l, [&] { return gen != g; });
    }
};
static Bar named[16], warpbar[16];
static float xf[16][32];
static inline void __syncthreads() {
    named[0].sync(512);
}
static inline void named_barrier(u32 id, u32 t) {
    named[id].sync(t);
}
static inline void __syncwarp() {
    warpbar[threadIdx.x / 32].sync(32);
}
static inline float __shfl_xor_sync(u32, float v, int k) {
    int w = threadIdx.x / 32, l = threadIdx.x % 32;
    xf[w][l] = v;
    warpbar[w].sync(32);
    float r = xf[w][l ^ k];
    warpbar[w].sync(32);
    return r;
}
static u32 xi[16][32];
static inline u32 __shfl_sync(u32, u32 v, u32 k) {
    int w = threadIdx.x / 32, l = threadIdx.x % 32;
    xi[w][l] = v;
    warpbar[w].sync(32);
    u32 r = xi[w][k % 32];
    warpbar[w].sync(32);
    return r;
}
static inline u32 __umulhi(u32 a, u32 b) {
    return u32(u64(a) * b >> 32);
}
static inline bool __any_sync(u32, bool p) {
    int w = threadIdx.x / 32, l = threadIdx.x % 32;
    xf[w][l] = p;
    warpbar[w].sync(32);
    bool r = false;
    for (int i = 0; i < 32; i++) r |= xf[w][i] != 0;
    warpbar[w].sync(32);
    return r;
}
struct MB {
    std::mutex m;
    std::condition_variable c;
    u32 count = 0, pending = 0, phase = 0;
};
static MB mbs[64];
static u64* mbase;
extern long mb_first;
static MB& mb(u64* p) {
    long i = (p - (u64*)memory) - mb_first;
    if (i < 0 || i >= 64) {
        printf("mb %ld\n", i);
        abort();
    }
    return mbs[i];
}
static inline void barrier_init(u64* p, u32 n) {
    mb(p).count = mb(p).pending = n;
    mb(p).phase = 0;
}
static inline void barrier_arrive(u64* p) {
    MB& b = mb(p);
    std::unique_lock<std::mutex> l(b.m);
    if (b.pending == 0) abort();
    if (--b.pending == 0) {
        b.pending = b.count;
        b.phase++;
        b.c.notify_all();
    }
}
static inline void barrier_wait(u64* p, u32 par) {
    MB& b = mb(p);
    std::unique_lock<std::mutex> l(b.m);
    b.c.wait(l, [&] { return (b.phase & 1) != par; });
}
static inline void fence_for_async() {}
static inline void copies_wait() {}
static inline void products_begin() {}
static inline void products_wait() {}
static inline u32 shared_address(const void* p) {
    return (u32)((const u8*)p - memory) + 1024;
}
static inline u64 operand(const void* rows) {
    return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(1) << 16) | ((shared_address(rows) & 0x3FFFF) >> 4);
}
static inline float bf(u16 b) {
    return __uint_as_float(u32(b) << 16);
}
static inline u16 tobf(float f) {
    u32 x = __float_as_uint(f);
    if (f != f) return 0x7FFF;
    return (x + 0x7FFF + ((x >> 16) & 1)) >> 16;
}
static inline u32 cvt_bf16x2(float hi, float lo) {
    return u32(tobf(hi)) << 16 | tobf(lo);
}
static inline u32 halves(float low, float high) {
    _Float16 two[2] = {_Float16(low), _Float16(high)};
    u32 pair;
    memcpy(&pair, two, 4);
    return pair;
}
static inline float half_at(u32 pair, int i) {
    _Float16 two[2];
    memcpy(two, &pair, 4);
    return float(two[i]);
}
static inline float e4m3(u32 c) {
    int s = c >> 7, e = c >> 3 & 15, m = c & 7;
    if (e == 15 && m == 7) return NAN;
    float v = e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
    return s ? -v : v;
}
static inline u32 scaled_shim(u32, u32) {
    abort();
}
static inline u32 product_bf16(float x, u16 factor) {
    return tobf(x * bf(factor));
}
static inline void decode_shim(u32 codes, u32 factor, u32& low, u32& high) {
    u32 b[4];
    for (int i = 0; i < 4; i++) {
        float value = e4m3(codes >> (8 * i) & 255);
        b[i] = V32 ? tobf(value * __uint_as_float(factor)) : product_bf16(value, i % 2 ? factor >> 16 : factor & 0xFFFF);
    }
    low = b[1] << 16 | b[0], high = b[3] << 16 | b[2];
}
static inline float at_desc(u64 d, u32 mn, u32 k, bool mnmajor) {
    if ((d >> 62) != 1 || ((d >> 49) & 7)) abort();
    u32 start = (d & 0x3FFF) << 4, lbo = ((d >> 16) & 0x3FFF) << 4, sbo = ((d >> 32) & 0x3FFF) << 4;
    u32 a = mnmajor ? start + (mn / 64) * lbo + (mn % 64) * 2 + (k % 8) * 128 + (k / 8) * sbo
                    : start + (mn / 8) * sbo + (mn % 8) * 128 + k * 2;
    a ^= ((a >> 7) & 7) << 4;
    if (a < 1024 || a - 1024 + 2 > SHARED) abort();
    u16 v;
    v = *(u16*)(memory + a - 1024);
    return bf(v);
}
template <int N>
static void mma(float* s, u64 a, u64 b, bool add, bool mnb) {
    int t = threadIdx.x % 128;
    int r0 = 16 * (t / 32) + t % 32 / 4;
    float A[2][16];
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 16; k++) A[r][k] = at_desc(a, r0 + 8 * r, k, false);
    for (int i = 0; i < N / 2; i++) {
        int n = 8 * (i / 4) + 2 * (t % 4) + (i & 1);
        int r = (i / 2) & 1;
        float acc = add ? s[i] : 0;
        for (int k = 0; k < 16; k++) acc += A[r][k] * at_desc(b, n, k, mnb);
        s[i] = acc;
    }
}
// The left operand in registers: of 16 columns each thread of a quad holds four, of both its rows.
template <int N>
static void mma_of_registers(float* s, const u32* a, u64 b, bool add) {
    static u32 all[16][32][4];
    int w = threadIdx.x / 32, l = threadIdx.x % 32;
    memcpy(all[w][l], a, 16);
    warpbar[w].sync(32);
    float A[2][16];
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 16; k++) {
            u32 two = all[w][l / 4 * 4 + k % 8 / 2][2 * (k / 8) + r];
            A[r][k] = bf(k % 2 ? two >> 16 : two & 0xFFFF);
        }
    warpbar[w].sync(32);
    for (int i = 0; i < N / 2; i++) {
        int n = 8 * (i / 4) + 2 * (l % 4) + (i & 1), r = (i / 2) & 1;
        float acc = add ? s[i] : 0;
        for (int k = 0; k < 16; k++) acc += A[r][k] * at_desc(b, n, k, true);
        s[i] = acc;
    }
}
static void store_matrices_shim(u32 to, const u32* four) {
    int l = threadIdx.x % 32;
    for (int m = 0; m < 4; m++) {
        u32 row = __shfl_sync(0, to, 8 * m + l / 4);
        memcpy(memory + row - 1024 + 4 * (l % 4), four + m, 4);
    }
}
static void load_matrices_shim(u32 (&four)[4], u32 from) {
    int l = threadIdx.x % 32;
    for (int m = 0; m < 4; m++) {
        u32 row = __shfl_sync(0, from, 8 * m + l / 4);
        memcpy(four + m, memory + row - 1024 + 4 * (l % 4), 4);
    }
}
