// matmul_int8.cu -- the product of signed bytes, with a scale for each row of both matrices.
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
// Same name  llmq/ops/matmul_int8.py  llmq/ref/matmul_int8.py  tests/ops/test_matmul_int8.py
#include "common.cuh"
#include "ptx.cuh"

constexpr int WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;
constexpr int WARP_M = 64, TILE_M = WARP_M * WARPS_M, TILE_N = WARP_N * WARPS_N;
constexpr int M16 = WARP_M / 16, N8 = WARP_N / 8;  // pieces of a warp's part
// Of each row of a tile, STEP bytes lie in shared memory in four units of 16. Unit u of row r is in
// place u ^ (r / 2 % 4): so the eight rows of an 8 x 8 matrix lie in different banks.
constexpr int STEP = 64, UNITS = STEP / 16;
constexpr int STAGE_BYTES = (TILE_M + TILE_N) * STEP;
constexpr int GROUP = 8;  // rows of tiles that are made together, so that they share b's in L2

__device__ __forceinline__ int place_of(int row, int unit) {
    return row * STEP + ((unit ^ (row >> 1 & 3)) << 4);
}

// Start copying bytes [k, k + STEP) of ROWS rows from `first` on, of a matrix (rows, K); what is
// outside of it becomes zeros.
template <int ROWS>
__device__ __forceinline__ void load_rows(SharedAddress to, const i8* from, i64 first, i64 rows,
                                          i64 k, i64 K) {
    constexpr int AT_ONCE = THREADS / UNITS;
    static_assert(ROWS % AT_ONCE == 0, "every thread copies as often");
    const int unit = threadIdx.x % UNITS, row = threadIdx.x / UNITS;
#pragma unroll
    for (int i = 0; i < ROWS; i += AT_ONCE) {
        const bool valid = first + row + i < rows && k + unit * 16 < K;
        const i8* p = from + (valid ? (first + row + i) * K + k + unit * 16 : 0);
        cp_async_16(to + place_of(row + i, unit), p, valid);
    }
}

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
    i64 tile_row, tile_column;
    find_tile(tile_row, tile_column, M, N);
    const int steps = (int)((K + STEP - 1) / STEP);
    const SharedAddress stages = shared_address(shared);

    auto load = [&](int step) {
        if (step < steps) {
            const SharedAddress to = stages + step % STAGES * STAGE_BYTES;
            load_rows<TILE_M>(to, a, tile_row, M, (i64)step * STEP, K);
            load_rows<TILE_N>(to + TILE_M * STEP, b, tile_column, N, (i64)step * STEP, K);
        }
        cp_async_commit();  // also without copies, so that groups are counted alike
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) { load(i); }

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int warp_row = warp % WARPS_M * WARP_M, warp_column = warp / WARPS_M * WARP_N;
    // The order of ldmatrix's four matrices, as in attention_mma.cuh: of a, rows 0 and 8 in the
    // first 16 bytes, then in the second; of b, which has its columns as rows, bytes first.
    const int a_row = warp_row + (lane & 15), a_unit = lane >> 4;
    const int b_row = warp_column + (lane & 7) + (lane >> 4) * 8, b_unit = lane >> 3 & 1;

    i32 sum[M16][N8][4] = {};
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // everybody's copies are there, and the stage before is used up
        load(step + STAGES - 1);
        const SharedAddress tile_a = stages + step % STAGES * STAGE_BYTES;
        const SharedAddress tile_b = tile_a + TILE_M * STEP;
#pragma unroll
        for (int k = 0; k < STEP / 32; ++k) {
            u32 left[M16][4], right[N8 / 2][4];
#pragma unroll
            for (int m = 0; m < M16; ++m) {
                ldmatrix_x4(left[m], tile_a + place_of(a_row + m * 16, a_unit + 2 * k));
            }
#pragma unroll
            for (int n = 0; n < N8 / 2; ++n) {
                ldmatrix_x4(right[n], tile_b + place_of(b_row + n * 16, b_unit + 2 * k));
            }
#pragma unroll
            for (int m = 0; m < M16; ++m) {
#pragma unroll
                for (int n = 0; n < N8 / 2; ++n) {
                    mma_m16n8k32_s8(sum[m][2 * n], left[m], right[n][0], right[n][1]);
                    mma_m16n8k32_s8(sum[m][2 * n + 1], left[m], right[n][2], right[n][3]);
                }
            }
        }
    }
    cp_async_wait<0>();
    store_result(out, sum, scale_a, scale_b, bias, tile_row + warp_row, tile_column + warp_column, M,
                 N);
}
