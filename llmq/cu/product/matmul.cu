// matmul.cu -- scales and scalars that a library's block-scaled product reads; and products of
// signed bytes.
//
//   scales[i] = 127, the code of scale 1;  scalars[0] = scale_a * scale_b * alpha;
//   scalars[4] = beta
//
// Data     declared in llmq/ops/product/matmul.py. scalars: the library reads elements 0 and 4.
// Launch   256 threads, ceil(n / 4096) blocks: one 16-byte store per thread.
// Cost     scales written once.
// Needs    nothing.
#include "common.cuh"
#include "product/product_sm80.cuh"

extern "C" __global__ void __launch_bounds__(256) block_scales(
    u8* __restrict__ scales, f32* __restrict__ scalars, const f32* __restrict__ scale_a,
    const f32* __restrict__ scale_b, f32 alpha, f32 beta, i64 n) {
    const i64 first = 16 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    if (first < n) {
        constexpr u32 ONES = 0x7F7F7F7F;
        *reinterpret_cast<uint4*>(scales + first) = make_uint4(ONES, ONES, ONES, ONES);
    }
    if (first == 0) {
        scalars[0] = scale_a[0] * scale_b[0] * alpha;
        scalars[4] = beta;
    }
}

// -- int8 product with a scale for each row of both matrices.
//
//   out[m, n] = (f32(sum over k of a[m, k] * b[n, k]) * (scale_a[m] * alpha)) * scale_b[n]
//               [+ bias[n] | + out]
//
// The sum is exact, in 32 bits; the rest is computed in F32 and rounded to out once. The kernel
// passes over `out` once; cuBLASLt would write sums as 32-bit integers, for another kernel to read.
//
// Data     a: I8 (M, K), b: I8 (N, K), out: D (M, N) (f32, bf16), scale_a: F32 (M), scale_b: F32
//          (N), bias: BF16 (N) or null. All 16-byte aligned.
// Launch   32 * WARPS_M * WARPS_N threads make TILE_M = 64 WARPS_M rows and TILE_N = WARP_N *
//          WARPS_N columns; a block for every tile, in one dimension. STAGES * (TILE_M + TILE_N) *
//          64 bytes of dynamic shared memory. BIAS and ACCUMULATE are constants.
// Cost     2 M N K operations of the tensor cores. A block reads (TILE_M + TILE_N) * K bytes; tiles
//          that run at the same time share them in the L2 cache.
// Needs    N and K multiples of 16; K at most 133144, so that no sum overflows. Compute capability
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
constexpr int GROUP = 8;  // rows of tiles computed together, which share b's tiles in L2

// Find the block's tile: blocks go down GROUP rows of tiles first, then across.
__device__ __forceinline__ void find_tile(i64& row, i64& column, i64 M, i64 N) {
    const int down = (int)((M + TILE_M - 1) / TILE_M), across = (int)((N + TILE_N - 1) / TILE_N);
    const int group = blockIdx.x / (GROUP * across), in_group = blockIdx.x % (GROUP * across);
    const int height = min(GROUP, down - group * GROUP);
    row = (i64)(group * GROUP + in_group % height) * TILE_M;
    column = (i64)(in_group / height) * TILE_N;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_int8(D* __restrict__ out, const i8* __restrict__ a, const i8* __restrict__ b,
            const f32* __restrict__ scale_a, const f32* __restrict__ scale_b,
            const D* __restrict__ bias, i64 M, i64 N, i64 K, f32 alpha) {
    extern __shared__ __align__(128) char shared[];
    i64 row, column;
    find_tile(row, column, M, N);
    Mainloop::Sums sum = {};
    Mainloop::run(sum, shared, {a + row * K, (int)K, (int)min((i64)TILE_M, M - row)},
                  {b + column * K, (int)K, (int)min((i64)TILE_N, N - column)}, (int)K);
    Mainloop::each_four(sum, [&](int down, int across, const i32(&total)[4]) {
        const i64 r = row + down, c = column + across;
        if (r < M && c < N) {
            const float own = scale_a[r] * alpha;
            const Four<f32> scale = *reinterpret_cast<const Four<f32>*>(scale_b + c);
            Four<D> more;
            if (BIAS) { more = *reinterpret_cast<const Four<D>*>(bias + c); }
            Four<D>* const to = reinterpret_cast<Four<D>*>(out + r * N + c);
            Four<D> result;
            if (ACCUMULATE) { result = *to; }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x = __int2float_rn(total[i]) * own * scale.v[i];
                if (BIAS) { x += to_f32(more.v[i]); }
                if (ACCUMULATE) { x += to_f32(result.v[i]); }
                result.v[i] = from_f32<D>(x);
            }
            *to = result;
        }
    });
}
