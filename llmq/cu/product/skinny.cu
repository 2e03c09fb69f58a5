// skinny.cu -- products of few rows with large matrices: out = alpha a b^T [+ bias] [+ addend].
//
//   out[m][n] = alpha * sum over k of a[m][k] b[n][k], in F32, plus what is added, rounded once
//
// Data     a: BF16 (M, K); b: BF16 (N, K); out, addend: D (M, N); bias: D (N). bias, addend may be
//          null.
//          skinny_nf4: rows first + [0, rows) of b as NF4 codes (quantize/four_bits.cu) of so many
//          modules, decoded to BF16. starts: I32 (E + 1), null where E = 1: rows [starts[e],
//          starts[e + 1]) of a are multiplied by the e-th N rows of b, with the e-th N of bias.
// Launch   32 WARPS threads, a block for each FEATURES rows of b; TILES: of 8 rows of a. The tensor
//          cores have b on the left, so that rows of a are columns. Warps take every eighth 64
//          elements of K; their sums are added one warp after the other.
//          skinny_nf4: grid (blocks, E); 128 elements of K, and any M.
// Cost     memory: b once, in 16-byte loads past L1; a from L1 and L2 for each block.
// Needs    sm_80; K a multiple of 8; M <= 8 TILES. A sum's order follows from K alone, not from M, N
//          or the other rows.
#include "common.cuh"
#include "ptx.cuh"
#include "quantize/nf4.cuh"

#ifndef TILES
#define TILES 1
#endif

constexpr int WARPS = 8, FEATURES = 16, COLUMNS = 8 * TILES;
constexpr int CHUNK = 64;  // elements of K at a time: of each row two vectors a lane
constexpr int NF4_CHUNK = 128;  // of NF4 codes: one vector a lane
constexpr int AHEAD = 4, NF4_AHEAD = 3;   // chunks that are on their way
constexpr int PITCH = FEATURES + 1;

// Two rows' elements of a chunk: vectors k and 32 + k behind its first element.
struct Fragment {
    uint4 rows[2][2];
};

__device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }

using Sums = float[TILES][4];

// Columns first + [0, FEATURES) of out, up to the column `end`: what all warps have summed, and what
// is added.
__device__ __forceinline__ void finish(const Sums& sum, D* out, const D* bias, const D* addend, int M,
                                       int N, int first, int end, float alpha) {
    __shared__ float sums[WARPS][COLUMNS * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
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
        if (m >= M || first + n >= end) { continue; }
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

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny(D* __restrict__ out, const bf16* __restrict__ a, const bf16* __restrict__ b,
           const D* __restrict__ bias, const D* __restrict__ addend, int M, int N, int K,
           float alpha) {
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
    Sums sum = {};
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
    finish(sum, out, bias, addend, M, N, first, N, alpha);
}

// Pairs of BF16 of eight codes, of two in a byte the first one in the higher bits.
__device__ __forceinline__ void decode(u32 (&pairs)[4], u32 word, const float* table, float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 two = word >> 8 * i;
        pairs[i] = to_pair(table[two >> 4 & 15] * scale, table[two & 15] * scale);
    }
}

// A lane's 32 codes of two rows of b, and the codes of their scales.
struct Codes {
    uint4 codes[2];
    u8 scales[2];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny_nf4(D* __restrict__ out, const bf16* __restrict__ a, const u8* __restrict__ codes,
               const u8* __restrict__ scale_codes, const float* __restrict__ groups,
               const float* __restrict__ mean, const float* __restrict__ levels,
               const D* __restrict__ bias, const D* __restrict__ addend,
               const int* __restrict__ starts, int M, int N, int K, int E, int first, int rows,
               int modules, float alpha) {
    __shared__ float table[16], scale_levels[GROUP];
    const int expert = blockIdx.y;
    const int begin = starts ? starts[expert] : 0, end = starts ? starts[expert + 1] : M;
    if (begin == end) { return; }
    if (threadIdx.x < 16) { table[threadIdx.x] = LEVELS[threadIdx.x]; }
    scale_levels[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int of_module = E * rows / modules, blocks = K / BLOCK;  // rows, and blocks of a row
    const i64 of_groups = ((i64)of_module * blocks + GROUP - 1) / GROUP;
    const float* group[2];
    float means[2];
    i64 row[2], block[2];  // its place, and its first block in its module
    bool there[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int n = blockIdx.x * FEATURES + 8 * r + g;
        there[r] = n < rows;
        row[r] = there[r] ? (i64)expert * rows + n : 0;
        group[r] = groups + row[r] / of_module * of_groups;
        means[r] = mean[row[r] / of_module];
        block[r] = row[r] % of_module * blocks;
    }
    const auto load = [&](int k) {
        Codes x;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool valid = there[r] && k < K;
            const u8* from = codes + (row[r] * K + k) / 2;
            x.codes[r] = valid ? __ldcs(reinterpret_cast<const uint4*>(from)) : zeros();
            x.scales[r] = valid ? scale_codes[row[r] * blocks + k / BLOCK] : 0;
        }
        return x;
    };
    for (int top = begin; top < end; top += COLUMNS) {
        Sums sum = {};
        for (int start = warp * NF4_CHUNK + 32 * t; start - 32 * t < K;
             start += NF4_AHEAD * WARPS * NF4_CHUNK) {
            Codes left[NF4_AHEAD];
#pragma unroll
            for (int i = 0; i < NF4_AHEAD; ++i) { left[i] = load(start + i * WARPS * NF4_CHUNK); }
#pragma unroll
            for (int i = 0; i < NF4_AHEAD; ++i) {
                const int k = start + i * WARPS * NF4_CHUNK;
                if (k - 32 * t >= K) { break; }
                float scale[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const bool valid = there[r] && k < K;
                    const float of = valid ? group[r][(block[r] + k / BLOCK) / GROUP] : 0.0f;
                    scale[r] = scale_levels[left[i].scales[r]] * of + means[r];
                }
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    u32 low[4], high[4];
                    decode(low, reinterpret_cast<const u32*>(&left[i].codes[0])[w], table, scale[0]);
                    decode(high, reinterpret_cast<const u32*>(&left[i].codes[1])[w], table, scale[1]);
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        const int m = top + tile * 8 + g;
                        uint4 x = zeros();
                        if (m < end && k < K) {
                            x = __ldg(reinterpret_cast<const uint4*>(a + (i64)m * K + k + 8 * w));
                        }
                        const u32 one[4] = {low[0], high[0], low[1], high[1]};
                        const u32 two[4] = {low[2], high[2], low[3], high[3]};
                        mma_m16n8k16_bf16(sum[tile], one, x.x, x.y);
                        mma_m16n8k16_bf16(sum[tile], two, x.z, x.w);
                    }
                }
            }
        }
        const i64 at = (i64)top * N;
        finish(sum, out + at, bias ? bias + (i64)expert * N : nullptr,
               addend ? addend + at : nullptr, end - top, N, first + blockIdx.x * FEATURES,
               first + rows, alpha);
        __syncthreads();  // before the sums of the next rows
    }
}
