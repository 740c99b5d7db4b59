// The blocks of attend_kernel one after the other, with shared memory that holds NaN before each.
#include <cstddef>

#include "kernel.h"

long mb_first = offsetof(Shared, keys_full) / 8;

extern "C" void launch(int across, int down, const u8* q, const float* sink, Out* out, float* lse, const u8* cache, const int* indices,
                       const int* lengths, const u8* extra_cache, const int* extra_indices, const int* extra_lengths, int heads,
                       int head_tiles, int width, int pool, int page, int extra_width, int extra_pool, int extra_page, i64 q_row,
                       i64 q_head, i64 page_stride, i64 divide, i64 list_row, i64 extra_page_stride, i64 extra_divide, i64 extra_list_row, float scale) {
    gridDim = {across, down, 1};
    for (int y = 0; y < down; ++y)
        for (int x = 0; x < across; ++x) {
            blockIdx = {x, y, 0};
            memset(memory, 0xFF, SHARED);
            std::vector<std::thread> threads;
            for (int thread = 0; thread < THREADS; ++thread)
                threads.emplace_back([&, thread] {
                    threadIdx = {thread, 0, 0};
                    attend_kernel(q, sink, out, lse, cache, indices, lengths, extra_cache, extra_indices, extra_lengths, heads,
                                  head_tiles, width, pool, page, extra_width, extra_pool, extra_page, q_row, q_head, page_stride,
                                  divide, list_row, extra_page_stride, extra_divide, extra_list_row, scale);
                });
            for (auto& thread : threads) thread.join();
        }
}
