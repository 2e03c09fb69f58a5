// document_sums.cuh -- sums over the tokens of each document of packed rows, for kernels of losses.
//
// Data     sums: F32 (3, n), written at the first positions of documents only.
// Launch   256 threads: a warp looks for documents that begin at its 32 positions, and adds up each
//          of them.
// Needs    each document lies within a row of seq_len positions; n < 2^31.
#pragma once
#include "common.cuh"

// belongs(i, column): whether position i is in the document that begins at this column of its row.
// add(i, total): adds the token at position i to a lane's three F64 sums.
template <class Belongs, class Add>
__device__ __forceinline__ void document_sums(f32* sums, i64 n, i32 seq_len, Belongs belongs,
                                              Add add) {
    const int lane = threadIdx.x & 31;
    const i64 first = (i64)blockIdx.x * 256 + (threadIdx.x & ~31), mine = first + lane;
    const bool begins = mine < n && belongs(mine, (int)((u32)mine % (u32)seq_len));
    u32 found = __ballot_sync(0xFFFFFFFFu, begins);
    while (found) {
        const i64 start = first + __ffs(found) - 1;
        found &= found - 1;
        const int own = (int)((u32)start % (u32)seq_len);
        const i64 end = start - own + seq_len;
        f64 total[3] = {0.0, 0.0, 0.0};
        for (i64 at = start + lane;; at += 32) {
            const bool here = at < end && belongs(at, own);
            if (here) { add(at, total); }
            if (!__all_sync(0xFFFFFFFFu, here)) { break; }
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const f64 sum = warp_sum(total[i]);
            if (lane == 0) { sums[i * n + start] = (f32)sum; }
        }
    }
}
