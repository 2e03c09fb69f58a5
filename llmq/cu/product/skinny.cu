// skinny.cu -- products of few rows with large matrices: out = alpha a b^T [+ bias] [+ addend].
//
//   out[m][n] = alpha * sum over k of a[m][k] b[n][k], in F32, plus what is added, rounded once
//
// Data     a: BF16 (M, K); b: BF16 (N, K); out, addend: D (M, N); bias: D (N). bias, addend may be
//          null.
// Launch   32 WARPS threads, a block for each FEATURES rows of b; TILES: of 8 rows of a. The tensor
//          cores have b on the left, so that rows of a are columns. Warps take every eighth 64
//          elements of K; their sums are added one warp after the other.
// Cost     memory: b once, in 16-byte loads past L1; a from L1 and L2 for each block.
// Needs    sm_80; K a multiple of 8; M <= 8 TILES. A sum's order follows from K alone, not from M, N
//          or the other rows.
#include "common.cuh"
#include "ptx.cuh"

#ifndef TILES
#define TILES 1
#endif

constexpr int WARPS = 8, FEATURES = 16, COLUMNS = 8 * TILES;
constexpr int CHUNK = 64;  // elements of K at a time: of each row two vectors a lane
constexpr int AHEAD = 4;   // chunks that are on their way
constexpr int PITCH = FEATURES + 1;

// Two rows' elements of a chunk: vectors k and 32 + k behind its first element.
struct Fragment {
    uint4 rows[2][2];
};

__device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny(D* __restrict__ out, const bf16* __restrict__ a, const bf16* __restrict__ b,
           const D* __restrict__ bias, const D* __restrict__ addend, int M, int N, int K,
           float alpha) {
    __shared__ float sums[WARPS][COLUMNS * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * FEATURES;
    const auto load = [&](int k) {
        Fragment x;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = first + 8 * r + g;
            const bf16* row = b + (i64)n * K;
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const int at = k + 32 * v + 8 * t;
                const bool there = n < N && at < K;
                x.rows[r][v] = there ? __ldcs(reinterpret_cast<const uint4*>(row + at)) : zeros();
            }
        }
        return x;
    };
    float sum[TILES][4] = {};
    for (int start = warp * CHUNK; start < K; start += AHEAD * WARPS * CHUNK) {
        Fragment left[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) { left[i] = load(start + i * WARPS * CHUNK); }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int k = start + i * WARPS * CHUNK;
            if (k >= K) { break; }
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const int at = k + 32 * v + 8 * t;
                const uint4 low = left[i].rows[0][v], high = left[i].rows[1][v];
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const int m = tile * 8 + g;
                    uint4 x = zeros();
                    if (m < M && at < K) {
                        x = __ldg(reinterpret_cast<const uint4*>(a + (i64)m * K + at));
                    }
                    // Lane t has the same four elements of K of both operands.
                    const u32 one[4] = {low.x, high.x, low.y, high.y};
                    const u32 two[4] = {low.z, high.z, low.w, high.w};
                    mma_m16n8k16_bf16(sum[tile], one, x.x, x.y);
                    mma_m16n8k16_bf16(sum[tile], two, x.z, x.w);
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = tile * 8 + 2 * t + i % 2, n = g + i / 2 * 8;
            sums[warp][m * PITCH + n] = sum[tile][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS * FEATURES; i += 32 * WARPS) {
        const int m = i / FEATURES, n = i % FEATURES;
        if (m >= M || first + n >= N) { continue; }
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) { total += sums[w][m * PITCH + n]; }
        total *= alpha;
        const i64 at = (i64)m * N + first + n;
        if (bias) { total += to_f32(bias[first + n]); }
        if (addend) { total += to_f32(addend[at]); }
        out[at] = from_f32<D>(total);
    }
}
