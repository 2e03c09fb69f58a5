// matmul.cu -- what a block-scaled product of the library reads beside its codes; and products of signed
// bytes.
//
//   scales[i] = 127, which is the scale 1;  scalars[0] = scale_a * scale_b;  scalars[4] = beta
//
// Data     scales: n bytes, a multiple of 16, 16-byte aligned. scalars: 8 numbers.
// Launch   256 threads, ceil(n / 4096) blocks: one 16-byte store per thread.
// Cost     scales written once.
// Needs    nothing.
#include "common.cuh"
#include "product_sm80.cuh"

extern "C" __global__ void __launch_bounds__(256) block_scales(
    u8* __restrict__ scales, f32* __restrict__ scalars, const f32* __restrict__ scale_a,
    const f32* __restrict__ scale_b, f32 beta, i64 n) {
    const i64 first = 16 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    if (first < n) {
        constexpr u32 ONES = 0x7F7F7F7F;
        *reinterpret_cast<uint4*>(scales + first) = make_uint4(ONES, ONES, ONES, ONES);
    }
    if (first == 0) {
        scalars[0] = scale_a[0] * scale_b[0];
        scalars[4] = beta;
    }
}

// -- the product of signed bytes, with a scale for each row of both matrices.
//
//   out[m, n] = (f32(sum over k of a[m, k] * b[n, k]) * scale_a[m]) * scale_b[n] [+ bias[n] | + out]
//
// The sum is exact, in 32 bits; the rest is computed in F32 and rounded to out once. That is one
// pass over `out`: cuBLASLt would write the sums as 32-bit integers, for another kernel to read.
//
// Data     a: I8 (M, K), b: I8 (N, K), out: D (M, N) (f32, bf16), scale_a: F32 (M), scale_b: F32
//          (N), bias: BF16 (N) or null. All 16-byte aligned.
// Launch   32 * WARPS_M * WARPS_N threads make TILE_M = 64 WARPS_M rows and TILE_N = WARP_N *
//          WARPS_N columns; a block for every tile, in one dimension. STAGES * (TILE_M + TILE_N) *
//          64 bytes of dynamic shared memory. BIAS and ACCUMULATE are constants.
// Cost     2 M N K operations of the tensor cores. A block reads (TILE_M + TILE_N) * K bytes; tiles
//          that run at the same time share them in the L2 cache.
// Needs    M, N, K multiples of 16; K at most 133144, so that no sum overflows. Compute capability
//          8.0.
#ifndef WARPS_M  // compiled for another entry
#define WARPS_M 1
#define WARPS_N 4
#define WARP_N 16
#define STAGES 4
#define BIAS 0
#define ACCUMULATE 0
#endif

using Mainloop = Sm80Mainloop<i8, WARPS_M, WARPS_N, WARP_N, STAGES>;
constexpr int TILE_M = Mainloop::ROWS, TILE_N = Mainloop::COLUMNS, THREADS = Mainloop::THREADS;
constexpr int M16 = Mainloop::M16, N8 = Mainloop::N8;  // pieces of a warp's part
constexpr int GROUP = 8;  // rows of tiles that are made together, so that they share b's in L2

// Which tile a block makes: down GROUP rows of tiles first, then across.
__device__ __forceinline__ void find_tile(i64& row, i64& column, i64 M, i64 N) {
    const int down = (int)((M + TILE_M - 1) / TILE_M), across = (int)((N + TILE_N - 1) / TILE_N);
    const int group = blockIdx.x / (GROUP * across), in_group = blockIdx.x % (GROUP * across);
    const int height = min(GROUP, down - group * GROUP);
    row = (i64)(group * GROUP + in_group % height) * TILE_M;
    column = (i64)(in_group / height) * TILE_N;
}

// Two pieces of 8 columns of one row, of which this lane (t: of four) has columns 2t and 2t + 1
// each: to p, where the first piece begins, in whole sectors of 32 bytes.
__device__ __forceinline__ void store_pieces(float* p, const float (&x)[4], int t, bool inside) {
    if (inside) {
        *reinterpret_cast<float2*>(p + 2 * t) = make_float2(x[0], x[1]);
        *reinterpret_cast<float2*>(p + 8 + 2 * t) = make_float2(x[2], x[3]);
    }
}
__device__ __forceinline__ void store_pieces(bf16* p, const float (&x)[4], int t, bool inside) {
    const u32 first = to_pair(x[0], x[1]), second = to_pair(x[2], x[3]);
    const bool odd = t & 1;  // an even lane gets four columns of the first piece, an odd one else
    const u32 got = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
    const uint2 four = odd ? make_uint2(got, second) : make_uint2(first, got);
    if (inside) { *reinterpret_cast<uint2*>(p + (odd ? 8 + 2 * t - 2 : 2 * t)) = four; }
}

// This warp's part of `out` from the sums; its first row and column are given.
__device__ __forceinline__ void store_result(D* out, const i32 (&sum)[M16][N8][4],
                                             const f32* scale_a, const f32* scale_b,
                                             const bf16* bias, i64 first_row, i64 first_column,
                                             i64 M, i64 N) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < N8; n += 2) {
        const i64 column = first_column + n * 8;  // a multiple of 16: both pieces are inside, or none
        const bool there = column < N;
        float scale[4], added[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const i64 c = column + k / 2 * 8 + 2 * t + k % 2;
            scale[k] = there ? scale_b[c] : 0.0f;
            added[k] = BIAS && there ? to_f32(bias[c]) : 0.0f;
        }
#pragma unroll
        for (int m = 0; m < M16; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i64 row = first_row + m * 16 + half * 8 + g;
                const bool inside = there && row < M;
                const float own = inside ? scale_a[row] : 0.0f;
                D* const p = out + (inside ? row * N + column : 0);
                float x[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const i32 total = sum[m][n + k / 2][half * 2 + k % 2];
                    x[k] = __int2float_rn(total) * own * scale[k];
                    if (BIAS) { x[k] += added[k]; }
                    if (ACCUMULATE && inside) { x[k] += to_f32(p[k / 2 * 8 + 2 * t + k % 2]); }
                }
                store_pieces(p, x, t, inside);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_int8(D* __restrict__ out, const i8* __restrict__ a, const i8* __restrict__ b,
            const f32* __restrict__ scale_a, const f32* __restrict__ scale_b,
            const bf16* __restrict__ bias, i64 M, i64 N, i64 K) {
    extern __shared__ __align__(128) char shared[];
    i64 row, column;
    find_tile(row, column, M, N);
    Mainloop::Sums sum = {};
    Mainloop::run(sum, shared, {a + row * K, (int)K, (int)min((i64)TILE_M, M - row)},
                  {b + column * K, (int)K, (int)min((i64)TILE_N, N - column)}, (int)K);
    store_result(out, sum, scale_a, scale_b, bias, row + Mainloop::warp_row(),
                 column + Mainloop::warp_column(), M, N);
}
