// grouped.cu -- products of rows, sorted by expert, with the matrices of the experts.
//
//   grouped_product   out[r] = x[r] @ w[e]^T (TRANS_B = 1) or x[r] @ w[e], + bias[e] + addend[r];
//                     with FP8 codes the product is multiplied by scale_x * scale_w
//   grouped_gradient  d_w[e] = or += d_y^T @ x over the rows of e; the product is rounded first
//
// Expert e has rows [starts[e], starts[e + 1]); only the device knows the number of its rows. The
// product has as many blocks as run at the same time. Each block takes every gridDim.x-th tile of
// all experts' tiles, and finds its tiles in starts, 32 experts at a time. Consecutive tiles of an
// expert go down the rows first, so that concurrent tiles share columns of the expert's matrix in
// the L2 cache. The gradient has a block for each tile of each expert's matrix.
//
// Data     declared in llmq/ops/experts/grouped.py. starts ascends from 0 to R; null: one expert
//          has all rows. addend may be out. HALF: sums of 64 products are in half precision, see
//          product_sm80.cuh.
// Launch   128 threads, with codes 256; STAGES * 16 KiB of dynamic shared memory. product: any
//          number of blocks; gradient: a block for each 128 x 128 of d_w.
// Cost     2 R N K FLOPs. A tile reads 128 rows of both operands. A partly filled tile costs as
//          much as a full tile, which wastes half a tile for each expert on average.
// Needs    compute capability 8.0, with codes 8.9. scalars' seed, step and micro_step, if the
//          kernel adds to a BF16 gradient.
#include "common.cuh"

#ifndef STAGES  // compiled for another entry
#define STAGES 2
#endif
#ifndef TRANS_B
#define TRANS_B 0
#endif
#ifndef HALF
#define HALF 0
#endif

#include "product/product_sm80.cuh"

constexpr u32 ALL = 0xFFFFFFFFu;
// With codes a warp has half the columns, because adding up the steps' sums needs registers.
constexpr bool CODES = sizeof(A) == 1;
using Forward = Sm80Mainloop<A, 2, CODES ? 4 : 2, CODES ? 32 : 64, STAGES, false, !TRANS_B, B, HALF>;
using Gradient = Sm80Mainloop<T, 2, 2, 64, STAGES, true, true>;
constexpr int TILE = Forward::ROWS;  // rows of a tile, and columns

// Rows [row, end), counted over all experts, and TILE columns from `column` on, of one expert.
struct Tile {
    int expert, row, end, column;
};

// The tiles of all experts, numbered in order. A warp must ask for tiles with rising numbers.
struct Tiles {
    const i32* starts;
    int R, E, across;
    int first = 0;   // first of the 32 experts looked at last
    i64 before = 0;  // tiles of the experts before `first`

    // Find tile `number`; false if there are fewer tiles.
    __device__ __forceinline__ bool find(i64 number, Tile& tile) {
        const int lane = threadIdx.x % 32;
        for (; first < E; first += 32) {
            const int e = first + lane;
            const int start = starts && e < E ? starts[e] : 0;
            const int end = e < E ? starts ? starts[e + 1] : R : 0;
            const int down = (end - start + TILE - 1) / TILE;
            i64 sum = (i64)down * across;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const i64 other = __shfl_up_sync(ALL, sum, distance);
                if (lane >= distance) { sum += other; }
            }
            const u32 beyond = __ballot_sync(ALL, number < before + sum);
            if (beyond) {
                const int owner = __ffs(beyond) - 1;
                const int high = __shfl_sync(ALL, down, owner);
                const i64 until = before + __shfl_sync(ALL, sum, owner);
                const int local = high * across - (int)(until - number);
                tile.expert = first + owner;
                tile.row = __shfl_sync(ALL, start, owner) + local % high * TILE;
                tile.end = min(__shfl_sync(ALL, end, owner), tile.row + TILE);
                tile.column = local / high * TILE;
                return true;
            }
            before += __shfl_sync(ALL, sum, 31);
        }
        return false;
    }
};

extern "C" __global__ void __launch_bounds__(Forward::THREADS, CODES ? 1 : 2)
grouped_product(T* out, const A* __restrict__ x, const B* __restrict__ w, const f32* scale_x,
                const f32* scale_w, const T* __restrict__ bias, const T* addend,
                const i32* __restrict__ starts, i32 R, i32 N, i32 K, i32 E) {
    extern __shared__ __align__(128) char shared[];
    const float scale = CODES ? *scale_x * *scale_w : 1.0f;
    Tiles tiles{starts, R, E, (N + TILE - 1) / TILE};
    Tile tile;
    for (i64 number = blockIdx.x; tiles.find(number, tile); number += gridDim.x) {
        const B* const matrix = w + (i64)tile.expert * N * K;
        const B* const right = matrix + (TRANS_B ? (i64)tile.column * K : tile.column);
        Forward::Sums sum = {};
        Forward::run(sum, shared, {x + (i64)tile.row * K, K, tile.end - tile.row},
                     {right, TRANS_B ? K : N, N - tile.column}, K);
        Forward::each_four(sum, [&](int row, int column, const float(&four)[4]) {
            const int r = tile.row + row, c = tile.column + column;
            if (r < tile.end && c < N) {
                const i64 at = (i64)r * N + c;
                Four<T> result;
                if (addend) { result = *reinterpret_cast<const Four<T>*>(addend + at); }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float x = CODES ? four[i] * scale : four[i];
                    if (bias) { x += to_f32(bias[(i64)tile.expert * N + c + i]); }
                    if (addend) { x += to_f32(result.v[i]); }
                    result.v[i] = from_f32<T>(x);
                }
                *reinterpret_cast<Four<T>*>(out + at) = result;
            }
        });
    }
}

extern "C" __global__ void __launch_bounds__(Gradient::THREADS, 2)
grouped_gradient(G* d_w, const T* __restrict__ d_y, const T* __restrict__ x,
                 const StepScalars* __restrict__ scalars, const i32* __restrict__ starts, i32 R,
                 i32 N, i32 K, i32 E, i32 accumulate, u32 salt) {
    extern __shared__ __align__(128) char shared[];
    const int down = (N + TILE - 1) / TILE, across = (K + TILE - 1) / TILE;
    const int e = blockIdx.x / (down * across), tile = blockIdx.x % (down * across);
    const int first_row = tile % down * TILE, first_column = tile / down * TILE;
    const int start = starts[e], rows = starts[e + 1] - start;
    if (rows == 0 && accumulate) { return; }
    Gradient::Sums sum = {};
    Gradient::run(sum, shared, {d_y + (i64)start * N + first_row, N, N - first_row},
                  {x + (i64)start * K + first_column, K, K - first_column}, rows);
    const u32 seed = gradient_seed(scalars, salt);
    Gradient::each_four(sum, [&](int row, int column, const float(&four)[4]) {
        const int n = first_row + row, k = first_column + column;
        if (n < N && k < K) {
            const i64 index = ((i64)e * N + n) * K + k;  // a multiple of 4
            Four<G>* const to = reinterpret_cast<Four<G>*>(d_w + index);
            Four<G> result;
            if (accumulate) { result = *to; }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const G x = from_f32<G>(four[i]);
                const u32 bits = gradient_bits(seed, index >> 3, index & 4 | i);
                result.v[i] = accumulate ? add_gradient(result.v[i], to_f32(x), bits) : x;
            }
            *to = result;
        }
    });
}
